"""Formulas by the kernels are torch's own, rounded once; what does not suit the kernels is computed by torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from compiled import needs_kernels
from torch import Tensor

from gspo.models import formulas, fused, heads, layers, native

_TOKENS = 300
_WIDE, _NARROW = 96, 40  # whole vectors, and not


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).bfloat16()


def widened(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x


def near(found: Any, exact: Any, bound: float = 2**-8) -> None:
    for a, b in zip(found, exact, strict=True):
        assert a.shape == b.shape
        assert float((a.double() - b).norm()) <= bound * float(b.norm())


def check(ours: Callable[..., Any], torchs: Callable[..., Any], *inputs: Any, bound: float = 2**-8) -> None:
    """As near to float64 as rounding the result allows."""
    exact = torchs(*(widened(x) for x in inputs))
    found = ours(*(x.clone() if isinstance(x, Tensor) else x for x in inputs))
    near(found if isinstance(found, tuple) else (found,), exact if isinstance(exact, tuple) else (exact,), bound)


@needs_kernels
@pytest.mark.parametrize("width", [_WIDE, _NARROW])
@pytest.mark.parametrize("shape", [(_TOKENS,), (1, 7)])
def test_norms_and_gates(width: int, shape: tuple[int, ...]) -> None:
    ours, torchs = formulas.of_layers(native.kernels()), layers.Kernels()
    x, y, z = (drawn(*shape, width, seed=i) for i in range(3))
    weight = drawn(width, seed=3)
    scale = torchs.fused.norm(x.double(), weight.double(), 1e-5)[1].float()
    check(ours.fused.norm, torchs.fused.norm, x, weight, 1e-5)
    check(ours.norm_of_sum, torchs.norm_of_sum, x, y, weight, 1e-5)
    check(ours.fused.norm_backward, torchs.fused.norm_backward, y, x, weight, scale)
    check(ours.norm_backward, torchs.norm_backward, y, x, weight, scale, z)
    check(ours.fused.gate, torchs.fused.gate, x, y)
    check(ours.fused.gate_backward, torchs.fused.gate_backward, z, x, y)
    check(ours.regate, torchs.regate, z, x, y)


@needs_kernels
@pytest.mark.parametrize("size", [32, 64, 48])
def test_positions(size: int) -> None:
    """With a cos and sin whose halves differ, which no model has: each half is read where it belongs."""
    ours, torchs = formulas.of_layers(native.kernels()), layers.Kernels()
    rows, cos, sin = drawn(_TOKENS, 7 * size, seed=0), drawn(_TOKENS, size, seed=1), drawn(_TOKENS, size, seed=2)
    check(ours.part, torchs.part, rows, cos, sin, 2, 0.3)
    grads = [drawn(_TOKENS, count, size, seed=3 + count) for count in (3, 2, 2)]
    check(
        lambda *x: ours.part_backward(x[:3], *x[3:]),
        lambda *x: torchs.part_backward(x[:3], *x[3:]),
        *grads,
        cos,
        sin,
        0.3,
    )


@needs_kernels
@pytest.mark.parametrize("columns", [64, 61])
@pytest.mark.parametrize("with_entropy", [True, False])
def test_log_probabilities(columns: int, with_entropy: bool) -> None:
    ours, torchs = formulas.of_head(native.kernels()), heads.Formulas()
    z = 5 * torch.randn(70, columns, generator=torch.Generator().manual_seed(0))
    state = [torch.full((70,), torch.finfo(torch.float32).min / 4), torch.zeros(70), torch.zeros(70)]
    state = list(torchs.absorb(3 * z.flip(0), *state)) if with_entropy else state
    check(ours.absorb, torchs.absorb, z, *state, bound=1e-6)
    lse, by_logprob, by_entropy, entropy = (
        z.logsumexp(1),
        *torch.randn(3, 70, generator=torch.Generator().manual_seed(1)),
    )
    inputs = (z, lse, by_logprob, by_entropy if with_entropy else None, entropy)
    found = ours.gradient(*inputs, dtype=torch.bfloat16)
    assert found.dtype == torch.bfloat16
    near((found,), (torchs.gradient(*(widened(x) for x in inputs), dtype=torch.float64),))


@needs_kernels
def test_what_is_no_number_stays_none() -> None:
    ours = formulas.of_head(native.kernels())
    z = torch.zeros(2, 32)
    z[1, 5] = torch.nan
    _, s, d = ours.absorb(z, torch.full((2,), -1e30), torch.zeros(2), torch.zeros(2))
    assert s.isnan().tolist() == [False, True]
    assert d.isnan().tolist() == [False, True]
    x = drawn(3, 32, seed=0)
    x[1, 7] = torch.nan
    modules = formulas.of_modules(native.kernels())
    assert modules.norm(x, x[0], 1e-5)[0].isnan().any(1).tolist() == [False, True, False]
    assert modules.gate(x, x).isnan().sum() == 1


@needs_kernels
def test_what_autograd_would_have_to_see_is_left_to_torch() -> None:
    """A kernel leaves no trace in the graph: its gradient would be lost without a word."""
    ours = formulas.of_layers(native.kernels())
    x, weight = drawn(3, 32, seed=0).requires_grad_(), drawn(32, seed=1)
    for y in (ours.fused.gate(x, x), ours.fused.norm(x, weight, 1e-5)[0], ours.norm_of_sum(x, x, weight, 1e-5)[1]):
        assert y.grad_fn is not None


@needs_kernels
def test_sums_over_tokens_do_not_depend_on_how_they_are_called() -> None:
    """The same number of threads gives the same bits."""
    kernels = formulas.of_modules(native.kernels())
    grad, x, weight = drawn(_TOKENS, 64, seed=0), drawn(_TOKENS, 64, seed=1), drawn(64, seed=2)
    scale = fused.norm(x, weight, 1e-5)[1]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        first, again = (kernels.norm_backward(grad, x, weight, scale) for _ in range(2))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    near(first, fused.norm_backward(grad.double(), x.double(), weight.double(), scale.double()))
