"""Sampling is the inverse CDF of the truncated softmax, and the log-probability is that distribution's."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from compiled import needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo.config import Sampling
from gspo.engines.sampler import sample
from gspo.models import native


def draw(logits: Tensor, uniform: list[float], greedy: bool = False, **keys: float) -> tuple[list[int], list[float]]:
    rows = len(uniform)
    logits_BV = logits.expand(rows, -1).clone()
    token_B, logprob_B = sample(
        logits_BV, torch.tensor(uniform, dtype=torch.float64), torch.full((rows,), greedy), Sampling(**keys)
    )
    return token_B.tolist(), logprob_B.tolist()


def truncated(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """The distribution by its definition; ties are kept together."""
    p = np.exp(logits / temperature - (logits / temperature).max())
    if top_k:
        p = np.where(p >= np.sort(p)[::-1][min(top_k, len(p)) - 1], p, 0)
    p /= p.sum()
    order = np.sort(p)[::-1]
    before = np.cumsum(order) - order
    p = np.where(p >= order[max(1, int((before < top_p).sum())) - 1], p, 0)
    return p / p.sum()


@given(
    seed=st.integers(0, 2**16),
    vocabulary=st.sampled_from([1, 5, 255, 256, 257, 600]),
    temperature=st.sampled_from([0.6, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 1000]),
    top_p=st.sampled_from([1.0, 0.9, 0.3, 1e-6]),
    uniform=st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=5),
)
@settings(max_examples=150, deadline=None)
def test_tokens_and_logprobs_are_the_definitions(
    seed: int, vocabulary: int, temperature: float, top_k: int, top_p: float, uniform: list[float]
) -> None:
    logits = 3 * torch.randn(vocabulary, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    p = truncated(logits.numpy(), temperature, top_k, top_p)
    found, logprobs = draw(logits, uniform, temperature=temperature, top_k=top_k, top_p=top_p)
    cdf = np.cumsum(p)
    for u, token, logprob in zip(uniform, found, logprobs, strict=True):
        assert p[token] > 0
        assert logprob == pytest.approx(np.log(p[token]), abs=1e-9)
        assert (cdf[token] - p[token]) - 1e-12 <= u <= cdf[token] + 1e-12


def test_even_numbers_give_each_token_its_share() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.15, 0.05, 0.0])
    grid = ((np.arange(10_000) + 0.5) / 10_000).tolist()
    with np.errstate(divide="ignore"):
        found, _ = draw(torch.tensor(np.log(p), dtype=torch.float32), grid)
    assert np.abs(np.bincount(found, minlength=6) - 10_000 * p).max() <= 1


@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_a_token_of_probability_zero_is_never_drawn(uniform: float) -> None:
    """At both ends of the vocabulary, and where a weight is too small for the format, whatever sums round to."""
    for likely in np.linspace(0.5, 1.5, 40):
        logits = torch.tensor([-float("inf"), -1e4, 0.0, float(likely), *[-1e4] * 300, -float("inf")])
        (token,), (logprob,) = draw(logits, [uniform])
        assert token == (2 if uniform == 0 else 3)
        assert np.isfinite(logprob)


def test_temperature_divides_the_logits_and_logprobs_are_processed() -> None:
    """huggingface/trl#4159: logits [2, 0], token 0, T = 0.5: -0.018150, not the raw -0.126928."""
    (token,), (logprob,) = draw(torch.tensor([2.0, 0.0]), [0.5], temperature=0.5)
    assert (token, round(logprob, 6)) == (0, -0.018150)


def test_top_p_beyond_the_first_candidates() -> None:
    """A flat distribution over 5000 tokens: half of the mass is 2500 of them."""
    logits = torch.linspace(0, 1e-3, 5000, dtype=torch.float64)
    found, logprobs = draw(logits, [0.0, 0.999999], top_p=0.5)
    assert found[0] == pytest.approx(2500, abs=2)
    assert found[1] == 4999
    assert logprobs[0] == pytest.approx(-np.log(2500), abs=1e-3)


def test_greedy_takes_the_likeliest_token_and_ignores_truncation_in_its_logprob() -> None:
    logits = torch.tensor([0.5, 2.0, 1.9, -1.0], dtype=torch.float64)
    (token,), (logprob,) = draw(logits, [0.999], greedy=True, top_k=1, temperature=0.7)
    assert token == 1
    assert logprob == pytest.approx(float(torch.log_softmax(logits / 0.7, 0)[1]))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_show_in_the_logprob(bad: float) -> None:
    _, (logprob,) = draw(torch.tensor([0.0, bad, 1.0]), [0.3])
    assert not np.isfinite(logprob)


def test_a_logprob_is_normalised_by_what_was_summed() -> None:
    """Equal float32 weights, whose own rounding would show in the eighth digit."""
    count = 49_157
    _, (logprob,) = draw(torch.full((count,), 0.7), [0.4])
    assert logprob == pytest.approx(-np.log(count), abs=1e-11)


# ------------------------------------------------------------------------------ with the compiled kernels


@needs_kernels
@pytest.mark.parametrize("vocabulary", [1, 5, 16, 255, 256, 257, 5000])
@pytest.mark.parametrize("keys", [{}, {"temperature": 0.6}, {"top_k": 40}, {"top_p": 0.8}])
def test_the_kernel_draws_what_torch_draws(vocabulary: int, keys: dict[str, float]) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    logits = 4 * torch.randn(400, vocabulary, generator=generator)
    uniform = torch.rand(400, dtype=torch.float64, generator=generator)
    greedy, settings = torch.zeros(400, dtype=torch.bool), Sampling(**keys)
    expected, logprob = sample(logits.clone(), uniform, greedy, settings)
    found, own = sample(logits.clone(), uniform, greedy, settings, native.kernels())
    assert float((found != expected).double().mean()) <= 0.005  # where a sum ends at the number itself
    assert torch.allclose(own[found == expected], logprob[found == expected], atol=2e-6)
    alone = [
        sample(z[None].clone(), u[None], greedy[:1], settings, native.kernels())
        for z, u in zip(logits, uniform, strict=True)
    ]
    assert torch.equal(torch.cat([token for token, _ in alone]), found)


@needs_kernels
@pytest.mark.parametrize("uniform", [0.0, 1 - 2**-53])
def test_the_kernel_draws_nothing_of_probability_zero(uniform: float) -> None:
    for likely in np.linspace(0.5, 1.5, 40):
        z = torch.tensor([[-float("inf"), -1e4, 0.0, float(likely), *[-1e4] * 300, -float("inf")]])
        token, logprob = native.kernels().sample(z, torch.tensor([uniform], dtype=torch.float64))
        assert int(token) == (2 if uniform == 0 else 3)
        assert float(logprob) == pytest.approx(float(torch.log_softmax(z, 1)[0, token]), abs=1e-6)


@needs_kernels
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", [0, 17, 299])
def test_the_kernel_shows_logits_that_are_not_finite(wrong: float, place: int) -> None:
    z = torch.zeros(2, 300)
    z[1, place] = wrong
    _, logprob = native.kernels().sample(z, torch.tensor([0.5, 0.5], dtype=torch.float64))
    assert torch.isfinite(logprob).tolist() == [True, False]
