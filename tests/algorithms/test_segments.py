"""Sums over packed rows against Python's exact sum; gradients, order, width and determinism."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gspo.algorithms.segments import segment_mean, segment_sum, spread

ROWS = st.lists(st.tuples(st.integers(0, 4), st.floats(-1e6, 1e6)), max_size=40)


@given(ROWS)
def test_sum_and_mean_per_row(tokens: list[tuple[int, float]]) -> None:
    sequence_N = torch.tensor([s for s, _ in tokens], dtype=torch.int64)
    x_N = torch.tensor([x for _, x in tokens], dtype=torch.float64)
    rows = [[x for s, x in tokens if s == row] for row in range(5)]
    sums = [math.fsum(row) for row in rows]
    assert segment_sum(x_N, sequence_N, 5).tolist() == pytest.approx(sums, abs=1e-8)
    means = [total / max(1, len(row)) for total, row in zip(sums, rows, strict=True)]
    assert segment_mean(x_N, sequence_N, 5).tolist() == pytest.approx(means, abs=1e-8)


def test_gradients_of_sum_mean_and_spread() -> None:
    sequence_N = torch.tensor([2, 0, 2, 2, 0])
    x_N = torch.randn(5, dtype=torch.float64, requires_grad=True)
    x_S = torch.randn(4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: segment_sum(x, sequence_N, 4), x_N)
    assert torch.autograd.gradcheck(lambda x: segment_mean(x, sequence_N, 4), x_N)
    assert torch.autograd.gradcheck(lambda x: spread(x, sequence_N), x_S)


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.float16])
def test_narrow_floats_are_widened_before_they_are_summed(narrow: torch.dtype) -> None:
    sequence_N = torch.zeros(4096, dtype=torch.int64)
    ones_N = torch.ones(4096, dtype=narrow)
    assert segment_sum(ones_N, sequence_N, 1).dtype == torch.float32
    assert segment_sum(ones_N, sequence_N, 1).item() == 4096.0
    assert segment_mean(ones_N, sequence_N, 1).item() == 1.0
    assert spread(torch.ones(1, dtype=narrow), sequence_N).dtype == torch.float32


def test_mean_of_a_long_row_resolves_far_less_than_the_clip_band() -> None:
    """32,768 log ratios of size 0.1 around 1e-4: the mean is right to a millionth of GSPO's 3e-4, in float32."""
    noise = torch.tensor([0.1, -0.1], dtype=torch.float64).repeat(16384)
    x_N = (noise + 1e-4).float()
    exact = math.fsum(x_N.tolist()) / len(x_N)
    mean = segment_mean(x_N, torch.zeros(len(x_N), dtype=torch.int64), 1).item()
    assert mean == pytest.approx(exact, abs=3e-10)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x_N = torch.tensor([1.0, math.nan, math.inf, 2.0])
    assert segment_sum(x_N, torch.tensor([0, 1, 2, 0]), 4).tolist() == [
        3.0,
        pytest.approx(math.nan, nan_ok=True),
        math.inf,
        0.0,
    ]


def test_bits_do_not_depend_on_the_run_with_several_threads() -> None:
    """float32 on several CPU threads: torch's own accumulating kernels add in any order there, forward and backward."""
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        generator = torch.Generator().manual_seed(0)
        x_N = torch.randn(1_000_000, generator=generator)
        x_S = torch.randn(7, generator=generator).requires_grad_()
        sequence_N = torch.randint(0, 7, (1_000_000,), generator=generator)
        sums, grads = set(), set()
        for _ in range(5):
            sums.add(segment_sum(x_N, sequence_N, 7).numpy().tobytes())
            (grad_S,) = torch.autograd.grad((spread(x_S, sequence_N) * x_N).sum(), x_S)
            grads.add(grad_S.numpy().tobytes())
        assert len(sums) == len(grads) == 1
    finally:
        torch.set_num_threads(threads)
