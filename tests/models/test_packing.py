"""Packed weights change how a layer is computed, for as long as the context is open, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import needs_kernels
from families import make
from torch import nn

from gspo.models import native, packing
from gspo.models.packing import PackedWeights

needs_packing = pytest.mark.skipif(not packing._works(), reason="this processor or torch packs no bfloat16 weights")


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(96, 160), nn.SiLU(), nn.Linear(160, 64, bias=False)).to(torch.bfloat16)


@needs_packing
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("kernels", [None, pytest.param(native.kernels, marks=needs_kernels)])
def test_products_are_the_plain_layers(rows: int, kernels: Callable[[], native.Kernels] | None) -> None:
    model, x = layers(), torch.randn(rows, 96, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(1))
    exact = model.double()(x.double()).detach()
    model = model.to(torch.bfloat16)
    with torch.no_grad(), PackedWeights(model, kernels and kernels()):
        found = model(x)
    assert found.dtype == torch.bfloat16
    assert float((found - exact).abs().max()) < 2**-6 * float(exact.abs().max())


@needs_packing
def test_copies_are_read_inside_and_parameters_outside() -> None:
    model, x = layers(), torch.ones(2, 96, dtype=torch.bfloat16)
    names = list(model.state_dict())
    with torch.no_grad():
        before, packed = model(x), PackedWeights(model)
        model[2].weight.neg_()
        with packed:
            assert torch.allclose(model(x), before, rtol=2**-6, atol=2**-6)
        assert torch.equal(model(x), -before)
        with PackedWeights(model):
            assert torch.allclose(model(x), -before, rtol=2**-6, atol=2**-6)
    assert list(model.state_dict()) == names
    model(x).sum().backward()
    assert all(p.grad is not None for p in model.parameters())


@needs_packing
def test_an_error_inside_closes_the_context() -> None:
    model = layers()
    with pytest.raises(RuntimeError), PackedWeights(model):
        model(torch.ones(2, 5, dtype=torch.bfloat16))
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_other_precisions_keep_their_layers(dtype: torch.dtype) -> None:
    model: Any = make("llama", dtype)
    with PackedWeights(model):
        assert all("forward" not in vars(m) for m in model.modules() if isinstance(m, nn.Linear))


def test_without_the_operations_layers_stay_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*_: Any) -> None:
        raise RuntimeError("could not create a primitive")

    packing._works.cache_clear()
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", gone)
    model, x = layers(), torch.ones(2, 96, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(x)
        with PackedWeights(model):
            assert torch.equal(model(x), expected)
    packing._works.cache_clear()
