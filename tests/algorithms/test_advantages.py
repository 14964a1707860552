"""Advantages against the recorded numbers and plain Python; weights against their definitions."""

from __future__ import annotations

import math
from statistics import fmean

import pytest
import torch
from cases import case, recorded, variant
from hypothesis import given
from hypothesis import strategies as st

from gspo.algorithms.advantages import advantages, carries_signal, token_weights
from gspo.presets import PRESETS, Algorithm

KINDS = ("group_mean_std", "group_mean", "leave_one_out", "batch_mean_std", "group_mean_batch_std")
SUM_OF_PARTS = 0.7 + 0.2 + 0.1
"""0.9999999999999999: equal to 1 but for rounding."""


def row(kind: str, *, ddof: int = 1, epsilon: float = 0.0) -> Algorithm:
    divisor = dict(advantage_ddof=ddof, advantage_epsilon=epsilon) if kind.endswith("std") else {}
    return Algorithm(ratio="token", gate="none", aggregation="token_mean", advantage=kind, **divisor)


def of(kind: str, rewards: list[float], groups: list[int], **keys: float) -> list[float]:
    reward_S = torch.tensor(rewards, dtype=torch.float64)
    return advantages(row(kind, **keys), reward_S, torch.tensor(groups)).tolist()


RECORDED = [
    ("grpo_ddof0", "group_mean_std", {"ddof": 0}),
    ("grpo_ddof1", "group_mean_std", {"ddof": 1}),
    ("grpo_ddof1_eps1e4", "group_mean_std", {"ddof": 1, "epsilon": 1e-4}),
    ("grpo_ddof1_eps1e6", "group_mean_std", {"ddof": 1, "epsilon": 1e-6}),
    ("dr_grpo_mean_only", "group_mean", {}),
    ("rloo", "leave_one_out", {}),
    ("reinforce_pp_global_norm_ddof0", "batch_mean_std", {"ddof": 0}),
    ("reinforce_pp_baseline_group_mean_then_global_std_ddof0", "group_mean_batch_std", {"ddof": 0}),
]


@pytest.mark.parametrize(("key", "kind", "keys"), RECORDED)
def test_recorded_advantages(key: str, kind: str, keys: dict[str, float]) -> None:
    section = recorded()["advantages"]
    got = of(kind, section["rewards"], section["group"], **keys)
    assert got == pytest.approx(section[key], abs=1e-12)
    flat = [value == 0.0 for value in section[key]]
    assert [value == 0.0 for value in got] == flat  # exactly


@pytest.mark.parametrize("name", [c["name"] for c in recorded()["vectors"] if c["inputs"]["rewards"]])
def test_advantages_of_the_recorded_cases(name: str) -> None:
    inputs = case(name)["inputs"]
    ddof = 1 if "ddof1" in name else 0
    got = of("group_mean_std", inputs["rewards"], inputs["group"], ddof=ddof)
    assert got == pytest.approx(inputs["adv"], abs=1e-12)
    assert of("group_mean", inputs["rewards"], inputs["group"]) == pytest.approx(inputs["adv_mean"], abs=1e-12)


# ------------------------------------------------------------------------------ rewards without a difference


def test_one_low_reward_among_equals_stays_within_bounds() -> None:
    """An advantage of -2075 for one wrong answer has been seen: a deviation from E[x²] - mean²."""
    rewards = [0.0] + [0.95] * 7
    assert max(map(abs, of("group_mean_std", rewards, [0] * 8))) <= 2.65
    assert of("group_mean_std", rewards, [0] * 8)[0] == pytest.approx(-7 / math.sqrt(8), abs=1e-12)
    assert of("leave_one_out", rewards, [0] * 8)[0] == pytest.approx(-0.95, abs=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("epsilon", [0.0, 1e-4])
def test_rewards_equal_but_for_rounding_carry_no_signal(kind: str, epsilon: float) -> None:
    rewards = [1.0, SUM_OF_PARTS, 1.0, 1.0]
    assert SUM_OF_PARTS != 1.0
    assert not carries_signal(rewards)
    assert of(kind, rewards, [0] * 4, epsilon=epsilon) == [0.0] * 4


@pytest.mark.parametrize("kind", ["group_mean_std", "group_mean", "leave_one_out", "group_mean_batch_std"])
def test_flat_groups_and_groups_of_one_are_exactly_zero_beside_others(kind: str) -> None:
    rewards, groups = [0.1, 1.0, 0.3, 0.1, 0.0, 0.1], [7, -2, 9, 7, -2, 7]
    got = of(kind, rewards, groups, epsilon=1e-6)
    assert [got[s] for s in (0, 2, 3, 5)] == [0.0] * 4
    assert got[1] == -got[4] > 0.4


def test_a_single_reward_is_no_advantage() -> None:
    known = recorded()["known_wrong"]["verl_skyrl_single_sample_group"]
    for kind in KINDS:
        assert of(kind, known["rewards"], [0]) == [known["right"]]


def test_carries_signal() -> None:
    assert not carries_signal([])
    assert not carries_signal([1.0])
    assert not carries_signal([0.0, 0.0])
    assert carries_signal([0.0, 1.0])
    assert carries_signal([0.5, 0.5, 0.5001])
    assert carries_signal([0.0, 1e-6])
    assert not carries_signal([1e6, 1e6 + 1e-3])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_not_finite_is_refused(reward: float) -> None:
    with pytest.raises(ValueError, match="without a verdict"):
        carries_signal([reward, 1.0])
    with pytest.raises(ValueError, match="without a verdict"):
        of("group_mean", [reward, 1.0], [0, 0])


# ------------------------------------------------------------------------------ groups


def test_uneven_groups_are_not_merged() -> None:
    known = recorded()["known_wrong"]["slime_uneven_groups_fall_back_to_one_group"]
    assert of("group_mean", known["rewards"], known["groups"]) == known["right_mean_centred"]


def test_groups_are_centred_each_by_itself() -> None:
    """Two groups of mean 0 and 1: centred over the batch they would be ±0.5."""
    assert of("group_mean", [0.0, 0.0, 1.0, 1.0], [0, 0, 1, 1]) == [0.0] * 4


REWARDS = st.lists(st.tuples(st.integers(-3, 3), st.integers(0, 8)), min_size=1, max_size=24)


@given(REWARDS, st.randoms(use_true_random=False), st.sampled_from(KINDS), st.sampled_from([0, 1]))
def test_order_of_rows_and_names_of_groups_do_not_matter(pairs: list, random: object, kind: str, ddof: int) -> None:
    rewards, groups = [r / 8 for _, r in pairs], [g for g, _ in pairs]
    before = of(kind, rewards, groups, ddof=ddof)
    order = list(range(len(pairs)))
    random.shuffle(order)  # type: ignore[attr-defined]
    after = of(kind, [rewards[s] for s in order], [1000 - 7 * groups[s] for s in order], ddof=ddof)
    assert after == pytest.approx([before[s] for s in order], abs=1e-12)


@given(REWARDS, st.floats(0.01, 100), st.floats(-100, 100), st.sampled_from(KINDS), st.sampled_from([0, 1]))
def test_shift_of_the_reward_does_nothing_and_scale_only_what_it_says(
    pairs: list, scale: float, shift: float, kind: str, ddof: int
) -> None:
    rewards, groups = [r / 8 for _, r in pairs], [g for g, _ in pairs]
    before = of(kind, rewards, groups, ddof=ddof)
    after = of(kind, [scale * r + shift for r in rewards], groups, ddof=ddof)
    factor = 1.0 if kind.endswith("_std") else scale
    assert after == pytest.approx([factor * a for a in before], rel=1e-9, abs=1e-9 * factor)
    if kind.startswith("group") or kind == "leave_one_out":
        flat = [len({r for r, h in zip(rewards, groups, strict=True) if h == g}) == 1 for g in groups]
        assert all(a == 0.0 for a, no_signal in zip(after, flat, strict=True) if no_signal)


@given(REWARDS, st.sampled_from([0, 1]))
def test_group_std_is_bounded_by_the_root_of_the_group_size(pairs: list, ddof: int) -> None:
    rewards, groups = [r / 8 for _, r in pairs], [g for g, _ in pairs]
    for g, advantage in zip(groups, of("group_mean_std", rewards, groups, ddof=ddof), strict=True):
        assert abs(advantage) <= math.sqrt(groups.count(g) - 1) + 1e-12


@given(REWARDS)
def test_leave_one_out_is_the_reward_less_the_mean_of_the_others(pairs: list) -> None:
    rewards, groups = [r / 8 for _, r in pairs], [g for g, _ in pairs]
    for s, advantage in enumerate(of("leave_one_out", rewards, groups)):
        others = [r for o, r in enumerate(rewards) if groups[o] == groups[s] and o != s]
        assert advantage == pytest.approx(rewards[s] - fmean(others) if others else 0.0, abs=1e-12)


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12))
def test_signal_and_non_zero_advantages_are_one_question(steps: list[int]) -> None:
    rewards = [0.7 + 0.2 + 0.1 if step == 2 else float(step) for step in steps]
    non_zero = any(a != 0 for a in of("group_mean_std", rewards, [3] * len(rewards)))
    assert carries_signal(rewards) == non_zero


def test_float32_rewards_get_float64_advantages() -> None:
    got = advantages(row("group_mean_std"), torch.tensor([1.0, 0.0, 0.0, 0.0]), torch.zeros(4, dtype=torch.int64))
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-15)


def test_advantages_of_a_critic_are_refused() -> None:
    with pytest.raises(ValueError, match="critic"):
        of("gae", [1.0, 0.0], [0, 0])


# ------------------------------------------------------------------------------ weights

LENGTHS = [2, 3, 1]
SEQUENCE_N = [0, 0, 1, 1, 1, 2]


def weights(row: Algorithm, **keys: int) -> list[float]:
    counts = {"sequences": 3, "tokens": 6, "max_new_tokens": 10} | keys
    return token_weights(row, length_S=torch.tensor(LENGTHS), sequence_N=torch.tensor(SEQUENCE_N), **counts).tolist()


def test_weights_of_each_aggregation() -> None:
    per_row = {s: 1 / (3 * n) for s, n in enumerate(LENGTHS)}
    assert weights(variant("gspo")) == pytest.approx([per_row[s] for s in SEQUENCE_N], abs=1e-16)
    assert weights(variant("dapo")) == [1 / 6] * 6
    assert weights(variant("luspo")) == [1 / 3] * 6
    assert weights(variant("dr_grpo")) == [1 / 30] * 6
    assert weights(variant("dr_grpo", length_constant=4)) == [1 / 12] * 6


def test_counts_are_those_of_the_whole_update() -> None:
    """The same tokens in an update twice as large count half."""
    for name in PRESETS:
        full, half = weights(PRESETS[name]), weights(PRESETS[name], sequences=6, tokens=12)
        assert half == pytest.approx([w / 2 for w in full], abs=1e-16)


def test_counts_of_less_than_is_given_are_refused() -> None:
    with pytest.raises(ValueError, match="6 tokens are given"):
        weights(variant("dapo"), tokens=5)
    with pytest.raises(ValueError, match="no sequence"):
        weights(variant("gspo"), sequences=0)


def test_an_empty_update_has_no_weights() -> None:
    none_N = torch.zeros(0, dtype=torch.int64)
    for row in PRESETS.values():
        got = token_weights(row, length_S=torch.zeros(3), sequence_N=none_N, sequences=0, tokens=0, max_new_tokens=9)
        assert got.tolist() == []
