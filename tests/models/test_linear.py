"""Linear layers whose weight gradient is written out: the plain layer's, in every dtype, with and without packing."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import families
import pytest
import torch
from torch import nn

from gspo.models import linear
from gspo.models.packing import PackedWeights


def gradients(layer: nn.Linear, x: torch.Tensor) -> dict[str, Any]:
    x = x.clone().requires_grad_()
    y = layer(x)
    (y.float() * torch.linspace(-1, 2, y.numel()).view_as(y)).sum().backward()
    found = {"value": y.detach(), "input": x.grad, "weight": layer.weight.grad}
    layer.zero_grad()
    return found


@pytest.mark.parametrize("shape", [(1, 37, 48), (5, 48), (2, 3, 48)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_value_and_gradients_are_the_plain_layers(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(48, 20, bias=False, dtype=dtype)
    ours = deepcopy(plain)
    linear.install(ours)
    x = torch.randn(shape).to(dtype)
    expected, found = gradients(plain, x), gradients(ours, x)
    for name, value in expected.items():
        assert families.relative_gap(found[name].double(), value.double()) < (1e-2 if dtype == torch.bfloat16 else 1e-6)
    ours.weight.requires_grad_(False)
    assert gradients(ours, x)["weight"] is None


def test_a_transposed_product_is_one() -> None:
    a, b = torch.randn(70, 33), torch.randn(70, 21)
    torch.testing.assert_close(linear.transposed_product(a, b), a.T @ b)
    found = linear.transposed_product(a.bfloat16(), b.bfloat16())
    torch.testing.assert_close(found.float(), a.bfloat16().float().T @ b.bfloat16().float(), rtol=2e-2, atol=5e-2)


def test_packed_weights_come_and_go_around_it() -> None:
    """Sampling swaps the layers' forward; afterwards they train as before."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False, dtype=torch.bfloat16), nn.Linear(64, 64, dtype=torch.bfloat16))
    linear.install(model)
    x = torch.randn(3, 64).bfloat16()
    before, installed = model(x), model[0].forward
    with PackedWeights(model):
        torch.testing.assert_close(model(x), before, rtol=2**-6, atol=2**-6)
    assert model[0].forward is installed
    assert "forward" not in vars(model[1])
