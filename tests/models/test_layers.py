"""Llama's layers as two functions: the model's own values and gradients, on a tree."""

from __future__ import annotations

import shutil
from copy import deepcopy
from typing import Any

import families
import pytest
import torch
from kept import kept_bytes
from torch import Tensor, nn

from gspo.models import fused, layers
from gspo.models.attention import ATTENTION, Packed
from gspo.models.cache import TreeCache
from gspo.models.heads import install_head, next_logits, trained_logprobs

TREE = families.tree([9, 5, 1, 7, 4], [None, 0, 0, None, 3])


def prepared(dtype: torch.dtype, kernels: layers.Kernels | None) -> Any:
    model = families.make("llama", torch.float32).to(dtype)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "norm" in name:
                p.add_(0.1 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)).to(dtype))
    model.set_attn_implementation(ATTENTION)
    install_head(model)
    if kernels is not None:
        layers.install(model, kernels)
    return model


def run(model: Any) -> dict[str, Tensor]:
    layout = Packed([len(ids) for ids in TREE.tokens], parents=TREE.parents)
    logprob_N, entropy_N = trained_logprobs(model, layout=layout, temperature=0.7, **TREE.rows())  # type: ignore[arg-type]
    weight_N = torch.linspace(-1, 2, len(logprob_N), dtype=logprob_N.dtype)
    (logprob_N @ weight_N + 0.3 * (entropy_N @ weight_N)).backward()
    found = {"logprob": logprob_N.detach(), **{name: p.grad for name, p in model.named_parameters()}}
    model.zero_grad()
    return found


def is_installed(model: Any) -> bool:
    return any("forward" in vars(m) for m in model.model.layers)


@pytest.mark.parametrize(("dtype", "gap"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
def test_values_and_gradients_are_the_models_own(dtype: torch.dtype, gap: float) -> None:
    ours = prepared(dtype, layers.Kernels())
    assert is_installed(ours)
    expected, found = run(prepared(dtype, None)), run(ours)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert families.relative_gap(found[name].double(), value.double()) < gap, name


def test_bfloat16_is_as_near_to_float32_as_the_models_own() -> None:
    exact, stock, ours = (
        run(prepared(torch.bfloat16, kernels).to(dtype))
        for kernels, dtype in ((None, torch.float32), (None, torch.bfloat16), (layers.Kernels(), torch.bfloat16))
    )
    for name, value in exact.items():
        gap, allowed = (families.relative_gap(found[name].double(), value.double()) for found in (ours, stock))
        assert gap < 1.3 * allowed + 1e-3, name


@pytest.mark.skipif(shutil.which("c++") is None, reason="torch.compile needs a C++ compiler")
def test_compiled_formulas_are_the_same() -> None:
    plain, made = layers.Kernels(), layers.compiled(fused.Kernels())
    rows, cos, sin = (
        torch.randn(shape, generator=torch.Generator().manual_seed(7)) for shape in ((5, 64), (5, 8), (5, 8))
    )
    parts = plain.part(rows, cos, sin, 2, 0.3)
    for a, b in zip(made.part(rows, cos, sin, 2, 0.3), parts, strict=True):
        torch.testing.assert_close(a, b)
    torch.testing.assert_close(made.part_backward(parts, cos, sin, 0.3), plain.part_backward(parts, cos, sin, 0.3))


def test_turning_and_its_gradient_belong_together() -> None:
    """By finite differences, in float64."""
    rows, cos, sin = (torch.randn(shape, dtype=torch.float64) for shape in ((3, 24), (3, 4), (3, 4)))
    rows.requires_grad_()
    expected = torch.autograd.functional.jacobian(
        lambda x: torch.cat(layers._part(x, cos, sin, 1, 0.3), 1).flatten(), rows
    )
    grad = torch.randn(3, 6, 4, dtype=torch.float64)
    found = layers._part_backward(grad.split([4, 1, 1], 1), cos, sin, 0.3)
    torch.testing.assert_close(found, torch.einsum("n,ntx->tx", grad.flatten(), expected))


@pytest.mark.parametrize("family", ["qwen3", "mistral", "gemma3"])
def test_layers_of_another_kind_stay_as_they_are(family: str) -> None:
    model = families.make(family, torch.float32)
    layers.install(model, layers.Kernels())
    assert not is_installed(model)


def test_a_layer_that_is_changed_later_computes_as_it_is_then() -> None:
    """An adapter takes the place of a projection."""

    class Doubled(nn.Module):
        def __init__(self, inner: nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.inner(x)

    stock, ours = prepared(torch.float32, None), prepared(torch.float32, layers.Kernels())
    for model in (stock, ours):
        attn = model.model.layers[0].self_attn
        attn.k_proj = Doubled(attn.k_proj)
    expected, found = run(stock), run(ours)
    for name, value in expected.items():
        assert families.relative_gap(found[name], value) < 1e-5, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_without_gradients_it_is_the_same_to_the_last_bit(dtype: torch.dtype) -> None:
    """The ratio of an unchanged policy is exactly 1."""
    model = prepared(dtype, layers.Kernels())
    layout = Packed([len(ids) for ids in TREE.tokens], parents=TREE.parents)
    trained = trained_logprobs(model, layout=layout, temperature=1.0, **TREE.rows())[0]  # type: ignore[arg-type]
    with torch.no_grad():
        old = trained_logprobs(model, layout=layout, temperature=1.0, **TREE.rows())[0]  # type: ignore[arg-type]
    assert torch.equal(trained.detach(), old)


def test_layouts_of_the_engine_go_through_the_modules() -> None:
    """In which it has put other weights."""
    model = prepared(torch.float32, layers.Kernels())
    seen: list[Tensor] = []
    model.model.layers[1].mlp.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    tokens_T, last = torch.arange(3, 12), torch.tensor([8])
    keys: Any = dict(tokens_T=tokens_T, position_T=torch.arange(9), source_N=last)
    engine = next_logits(model, layout=TreeCache(40).prefill(["prompt"], [9], "cpu"), **keys)
    assert len(seen) == 1
    torch.testing.assert_close(next_logits(model, layout=Packed([9]), **keys), engine)
    assert len(seen) == 1


def test_less_is_kept_for_the_backward_pass() -> None:
    layout = Packed([len(ids) for ids in TREE.tokens], parents=TREE.parents)

    def kept(model: Any) -> int:
        return kept_bytes(model, lambda: trained_logprobs(model, layout=layout, temperature=1.0, **TREE.rows()))  # type: ignore[arg-type]

    modules = prepared(torch.bfloat16, None)
    fused.install(modules, fused.Kernels())
    assert kept(prepared(torch.bfloat16, layers.Kernels())) < 0.95 * kept(modules)


def test_a_copy_of_the_model_computes_with_its_own_weights() -> None:
    """As the engine that rounds has one."""
    model = prepared(torch.float32, layers.Kernels())
    copy = deepcopy(model)
    before = run(model)["logprob"]
    with torch.no_grad():
        for p in copy.parameters():
            p.mul_(0.5)
    torch.testing.assert_close(run(model)["logprob"], before, rtol=0, atol=0)
    assert not torch.allclose(run(copy)["logprob"], before)
