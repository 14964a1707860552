"""What a loss says it did: which tokens and rows lost their gradient, on which side, and how far the policy moved."""

from __future__ import annotations

import math
from statistics import fmean, pstdev

import pytest
import torch
from cases import Padded, evaluate, random_batch, variant
from hypothesis import given, settings
from hypothesis import strategies as st

from gspo.algorithms.losses import PolicyInputs, Tally, policy_loss
from gspo.presets import PRESETS, Algorithm


def rows_of(log_ratio: list[list[float]], advantage: list[list[float]]) -> Padded:
    log, per_token = (torch.tensor(x, dtype=torch.float64) for x in (log_ratio, advantage))
    old = torch.full_like(log, -0.7)
    return Padded(old + log, old, old.clone(), old - 0.1, per_token, torch.ones_like(log, dtype=torch.bool))


def sides(tally: Tally) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    rows = (tally.rows_upper_positive, tally.rows_lower_negative, tally.rows_upper_negative)
    return rows, (tally.tokens_upper_positive, tally.tokens_lower_negative, tally.tokens_upper_negative)


FOUR = [[0.5, 0.6], [-0.5, -0.6], [0.5, 0.6], [-0.5, -0.6]]
SIGNS = [[1.0, 1.0], [1.0, 1.0], [-1.0, -1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(
    ("row", "rows", "tokens"),
    [
        (variant("gspo"), (1, 1, 0), (2, 2, 0)),
        (variant("gspo_token"), (1, 1, 0), (2, 2, 0)),
        (variant("grpo"), (1, 1, 0), (2, 2, 0)),
        (variant("ppo", weight_cap=1.5), (1, 1, 1), (2, 2, 2)),
        (variant("ppo", weight_cap=1.75), (1, 1, 0), (2, 2, 1)),
        (variant("gmpo"), (1, 1, 0), (2, 2, 0)),
        (variant("minirl"), (1, 1, 0), (2, 2, 0)),
        (variant("dppo", clip_low=0.2, clip_high=0.35), (0, 0, 0), (1, 1, 0)),
        (variant("cispo"), (0, 0, 0), (0, 0, 0)),
        (variant("rloo"), (0, 0, 0), (0, 0, 0)),
        (variant("sapo"), (0, 0, 0), (0, 0, 0)),
    ],
    ids=lambda x: f"{x.name}-{x.weight_cap}" if isinstance(x, Algorithm) else None,
)
def test_sides_of_each_gate(row: Algorithm, rows: tuple[int, int, int], tokens: tuple[int, int, int]) -> None:
    tally = evaluate(rows_of(FOUR, SIGNS), row).tally
    assert sides(tally) == (rows, tokens)
    assert (tally.rows, tally.tokens) == (4, 8)
    assert tally.clip_rows == sum(rows) / 4
    assert tally.clip_tokens == sum(tokens) / 8


def test_a_row_is_lost_when_all_of_its_tokens_are() -> None:
    tally = evaluate(rows_of([[0.5, 0.1], [0.5, 0.5]], [[1.0, 1.0], [1.0, 1.0]]), variant("grpo")).tally
    assert (tally.rows_lost, tally.tokens_lost) == (1, 3)


def test_rows_without_advantage_are_not_counted() -> None:
    """Three rows of four have no advantage and could not lose anything: the share is 1, not 1/4."""
    tally = evaluate(rows_of([[0.5, 0.5]] * 4, [[1.0, 1.0]] + [[0.0, 0.0]] * 3), variant("gspo")).tally
    assert (tally.rows, tally.tokens, tally.all_rows, tally.all_tokens) == (1, 2, 4, 8)
    assert tally.clip_rows == 1.0


def test_tokens_without_advantage_do_not_keep_a_row_alive() -> None:
    tally = evaluate(rows_of([[0.5, 0.0]], [[1.0, 0.0]]), variant("grpo")).tally
    assert (tally.rows, tally.tokens, tally.clip_rows, tally.clip_tokens) == (1, 1, 1.0, 1.0)
    edged = evaluate(rows_of([[0.5, -0.5]], [[1.0, 0.0]]), variant("gmpo")).tally  # clips the second in the mean
    assert (edged.clip_rows, edged.clip_tokens) == (1.0, 1.0)


def test_tokens_of_weight_zero_are_not_in_the_loss_nor_in_the_shares() -> None:
    """Answers cut at the length limit keep their advantage and get the weight 0 (mask_truncated)."""
    batch = rows_of([[0.5, 0.5], [0.5, 0.5], [0.0, 0.0]], [[1.0, 1.0]] * 3)
    log_N, sequence_N = batch.logprob.flatten(), torch.tensor([0, 0, 1, 1, 2, 2])
    weight_N = torch.tensor([0.25, 0.25, 0.0, 0.0, 0.25, 0.25], dtype=torch.float64)
    inputs = PolicyInputs(
        log_N, batch.old.flatten(), batch.rollout.flatten(), None, torch.ones_like(log_N), weight_N, sequence_N, 3
    )
    _, tally = policy_loss(inputs, PRESETS["gspo"])
    assert (tally.rows, tally.tokens, tally.all_rows) == (2, 4, 3)
    assert tally.clip_rows == tally.clip_tokens == 0.5


def test_dropped_tokens_are_counted_apart_from_clipped_ones() -> None:
    batch = rows_of([[0.0, 0.0], [0.0, 0.0]], [[1.0, 1.0], [-1.0, -1.0]])
    batch.rollout[0, 0] -= 3.0
    batch.rollout[1, 1] -= 3.0
    batch.advantage[1, 1] = 0.0
    row = variant("grpo", correction="token_mask", correction_band=(0.5, 2.0))
    tally = evaluate(batch, row).tally
    assert (tally.tokens_dropped, tally.tokens_lost) == (1, 0)


@given(st.lists(st.lists(st.floats(-0.5, 0.5), min_size=3, max_size=3), min_size=1, max_size=5))
@settings(deadline=None, max_examples=50)
def test_spread_of_the_log_ratios_and_the_divergence(log_ratio: list[list[float]]) -> None:
    batch = rows_of(log_ratio, [[1.0] * 3] * len(log_ratio))
    tally = evaluate(batch, variant("gspo")).tally
    moved = (batch.logprob - batch.old).tolist()
    assert tally.std_log_ratio_rows == pytest.approx(pstdev([fmean(row) for row in moved]), abs=1e-7)
    assert tally.std_log_ratio_tokens == pytest.approx(pstdev([x for row in moved for x in row]), abs=1e-7)
    d = (batch.logprob - batch.reference).flatten().tolist()
    assert tally.kl == pytest.approx(fmean(math.exp(-x) - 1 + x for x in d), abs=1e-12)


def test_log_ratios_are_to_the_anchor_of_the_row() -> None:
    batch = random_batch([3, 4], seed=0)
    old, rollout = (evaluate(batch, variant("gspo", anchor=anchor)).tally for anchor in ("old", "rollout"))
    log = torch.where(batch.mask, batch.logprob - batch.rollout, 0.0)
    assert rollout.log_ratio_tokens_sum == pytest.approx(float(log.sum()), abs=1e-12)
    assert old.log_ratio_tokens_sum != pytest.approx(rollout.log_ratio_tokens_sum, abs=1e-3)


def test_zero_and_sum() -> None:
    zero = Tally()
    assert (zero.clip_rows, zero.clip_tokens, zero.std_log_ratio_rows, zero.std_log_ratio_tokens, zero.kl) == (0.0,) * 5
    tally = evaluate(random_batch([2, 3, 1], seed=0), variant("gspo")).tally
    assert tally + zero == zero + tally == tally
    assert sum([tally, tally], Tally()).rows == 2 * tally.rows > 0
    assert (tally + tally).clip_rows == tally.clip_rows
    assert isinstance(tally.rows, int)
    assert isinstance(tally.kl_sum, float)


def test_a_broken_log_probability_shows() -> None:
    batch = rows_of([[0.0, math.nan]], [[1.0, 1.0]])
    got = evaluate(batch, PRESETS["gspo"])
    assert math.isnan(got.loss)
    assert math.isnan(got.tally.std_log_ratio_rows)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_an_overflow_that_a_gate_sets_aside_leaves_finite_gradients(name: str) -> None:
    """A log ratio of 800 overflows even float64. Where the clip, or an advantage of 0, sets it aside, nothing may be NaN."""
    row = PRESETS[name]
    batch = rows_of([[800.0, 800.0], [0.0, 0.0]], [[0.0, 0.0], [1.0, 1.0]])
    got = evaluate(batch, row)
    assert math.isfinite(got.loss)
    assert torch.isfinite(got.grad).all()
    assert not got.grad[0].any()
    if row.gate in ("clip", "sapo", "gmpo", "minirl", "vespo"):
        taken = evaluate(rows_of([[800.0, 800.0], [0.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]]), row)
        assert torch.isfinite(taken.grad).all()
        assert math.isfinite(taken.loss)
        assert taken.tally.rows_upper_positive == 1
