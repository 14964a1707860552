"""GAE, value loss and KL controller: recorded vectors, a float64 loop over random masks, and the field's own failures."""

from __future__ import annotations

import pytest
import torch
from cases import recorded
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from gspo.algorithms.losses import kl_term
from gspo.algorithms.values import explained_variance, gae, next_kl_coefficient, value_loss, whitened

VECTOR = recorded()["ppo_gae_value"]
MASK = torch.tensor(VECTOR["mask"]) > 0
LENGTHS = MASK.sum(1)


def packed(name: str) -> Tensor:
    """The recorded numbers at the policy's own tokens, row after row: the others are not there."""
    return torch.tensor(VECTOR[name], dtype=torch.float64)[MASK]


def recorded_rewards() -> Tensor:
    logp, reference = packed("logp"), packed("ref_logp")
    reward = -VECTOR["kl_coef"] * kl_term("k1", logp, logp, reference)
    return reward.index_add(0, LENGTHS.cumsum(0) - 1, torch.tensor(VECTOR["score"], dtype=torch.float64))


def test_the_recorded_rewards_advantages_and_returns() -> None:
    reward = recorded_rewards()
    torch.testing.assert_close(reward, packed("token_rewards"), rtol=0, atol=1e-12)
    advantage, returns = gae(reward, packed("values"), LENGTHS, gamma=VECTOR["gamma"], gae_lambda=VECTOR["lam"])
    torch.testing.assert_close(advantage, packed("advantages"), rtol=0, atol=1e-12)
    torch.testing.assert_close(returns, packed("returns"), rtol=0, atol=1e-12)
    assert not torch.allclose(advantage, packed("WRONG_advantages_reading_through_mask_hole"))
    everyone = torch.ones(len(advantage), dtype=torch.bool)
    # The record adds 1e-8 to the deviation.
    torch.testing.assert_close(whitened(advantage, everyone), packed("advantages_whitened_ddof1"), rtol=0, atol=1e-7)


def test_the_recorded_value_loss_its_clip_and_its_gradient() -> None:
    value = packed("new_values").requires_grad_()
    weight = torch.full_like(packed("values"), 1 / 6)
    loss, tally = value_loss(value, packed("values"), packed("returns"), weight, VECTOR["value_clip"])
    loss.backward()
    assert float(loss.detach()) == pytest.approx(VECTOR["value_loss"], abs=1e-14)
    assert tally.clip_values == VECTOR["value_clip_frac"]
    assert tally.value_loss == float(loss.detach())
    torch.testing.assert_close(value.grad, packed("value_grad"), rtol=0, atol=1e-12)


def loop(rewards: list[float], values: list[float], mask: list[bool], gamma: float, lam: float) -> list[float]:
    """GAE of one padded row, step by step: masked slots are passed over, and nothing is read at them."""
    advantages, carried, following = [0.0] * len(mask), 0.0, 0.0
    for t in reversed(range(len(mask))):
        if mask[t]:
            carried = rewards[t] + gamma * following - values[t] + gamma * lam * carried
            following = values[t]
            advantages[t] = carried
    return advantages


NUMBER = st.floats(-10, 10)
ROWS = st.lists(st.lists(st.tuples(NUMBER, NUMBER, st.booleans()), min_size=1, max_size=7), min_size=1, max_size=4)


@given(ROWS, st.floats(0, 1), st.floats(0, 1))
def test_gae_is_the_loop_over_the_unmasked(rows: list, gamma: float, lam: float) -> None:
    kept = [[cell for cell in row if cell[2]] for row in rows]
    expected = [
        a
        for row in rows
        for a, (_, _, seen) in zip(loop(*map(list, zip(*row, strict=True)), gamma, lam), row, strict=True)
        if seen
    ]
    reward = torch.tensor([r for row in kept for r, _, _ in row], dtype=torch.float64)
    value = torch.tensor([v for row in kept for _, v, _ in row], dtype=torch.float64)
    lengths = torch.tensor([len(row) for row in kept])
    advantage, returns = gae(reward, value, lengths, gamma=gamma, gae_lambda=lam)
    assert advantage.tolist() == pytest.approx(expected, abs=1e-9)
    torch.testing.assert_close(returns, advantage + value)


def test_a_masked_value_is_never_the_next_one() -> None:
    """P22, alibaba/ROLL#447: mask [1, 1, 0], reward [0, 1, 0], values [0, 0, 100] gave advantages of 5.7 and 6.0."""
    advantage, _ = gae(torch.tensor([0.0, 1.0]), torch.zeros(2), torch.tensor([2]), gamma=1.0, gae_lambda=0.95)
    assert advantage.tolist() == pytest.approx([0.95, 1.0], abs=1e-15)


def test_lambda_1_takes_the_rewards_as_they_came_and_lambda_0_the_next_value() -> None:
    reward, value = torch.tensor([0.0, 1.0, 2.0, 5.0]), torch.tensor([3.0, -1.0, 0.5, 4.0])
    lengths = torch.tensor([3, 1])
    _, returns = gae(reward, value, lengths, gamma=0.5, gae_lambda=1.0)
    assert returns.tolist() == [0.0 + 0.5 * 1 + 0.25 * 2, 1 + 0.5 * 2, 2.0, 5.0]
    advantage, _ = gae(reward, value, lengths, gamma=0.5, gae_lambda=0.0)
    assert advantage.tolist() == [0 + 0.5 * -1 - 3, 1 + 0.5 * 0.5 + 1, 2 - 0.5, 5 - 4]


def test_a_value_that_is_not_finite_stays_in_its_answer() -> None:
    reward, value = torch.tensor([1.0, 1.0, 1.0]), torch.tensor([torch.nan, 0.0, 0.0])
    advantage, _ = gae(reward, value, torch.tensor([1, 2]), gamma=1.0, gae_lambda=1.0)
    assert advantage[1:].tolist() == [2.0, 1.0]


def test_whitening_reads_only_what_counts_and_makes_no_signal_of_rounding() -> None:
    counted = torch.tensor([True, True, False, True])
    out = whitened(torch.tensor([1.0, 2.0, 100.0, 3.0], dtype=torch.float64), counted)
    assert out[counted].tolist() == pytest.approx([-1, 0, 1])
    same = torch.tensor([0.7 + 0.2 + 0.1, 1.0, 5.0, 1.0], dtype=torch.float64)
    assert whitened(same, counted).tolist() == [0.0] * 4
    assert whitened(torch.tensor([3.0]), torch.tensor([True])).tolist() == [0.0]


@given(st.lists(st.tuples(NUMBER, NUMBER, NUMBER, st.floats(0, 1)), min_size=1, max_size=8), st.floats(0.01, 3))
def test_the_value_loss_is_the_larger_square(cells: list, clip: float) -> None:
    value, old, target, weight = (torch.tensor(x, dtype=torch.float64) for x in zip(*cells, strict=True))
    expected = 0.0
    for v, o, r, w in cells:
        expected += w * max((v - r) ** 2, (min(max(v, o - clip), o + clip) - r) ** 2) / 2
    assert float(value_loss(value, old, target, weight, clip)[0]) == pytest.approx(expected, rel=1e-9, abs=1e-9)
    plain = sum(w * (v - r) ** 2 / 2 for v, _, r, w in cells)
    loss, tally = value_loss(value, old, target, weight, None)
    assert float(loss) == pytest.approx(plain, rel=1e-9, abs=1e-9)
    assert tally.values_clipped == 0


def test_tokens_of_weight_0_are_not_counted() -> None:
    ones = torch.ones(2)
    _, tally = value_loss(torch.tensor([1.0, 1.0]), torch.zeros(2), ones * 2, torch.tensor([1.0, 0.0]), 0.2)
    assert (tally.values, tally.values_clipped) == (1, 1)


def test_explained_variance() -> None:
    outcome = torch.tensor([0.0, 1.0, 0.0, 1.0])
    assert explained_variance(outcome, outcome) == 1.0
    assert explained_variance(outcome, torch.full((4,), 0.3)) == pytest.approx(0.0, abs=1e-6)
    assert explained_variance(outcome, 1 - outcome) == pytest.approx(-3.0)
    assert explained_variance(torch.ones(4), outcome) is None


def test_the_coefficient_follows_the_target() -> None:
    """arXiv 1909.08593 section 2.2: at most 2 % a step, towards the target."""
    assert next_kl_coefficient(0.1, [2.0, 2.0], 2.0) == pytest.approx(0.1)
    assert next_kl_coefficient(0.1, [2.2, 2.2], 2.0) == pytest.approx(0.1 * 1.01)
    assert next_kl_coefficient(0.1, [50.0], 2.0) == pytest.approx(0.1 * 1.02)
    assert next_kl_coefficient(0.1, [-1.0, 0.0], 2.0) == pytest.approx(0.1 * 0.98)
    assert next_kl_coefficient(0.1, [], 2.0) == 0.1
