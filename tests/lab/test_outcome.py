"""Numbers of an arm, from the lines of a journal."""

from __future__ import annotations

from typing import Any

import pytest

from gspo.lab.outcome import curves_of, outcome_of, trailing


def lines(rewards: list[float | None], **more: Any) -> list[dict[str, Any]]:
    return [
        {"step": i + 1, "reward/mean": r, "rollouts/total": 8, "time/step": 2.0, "time/eval": 0.5, **more}
        for i, r in enumerate(rewards)
    ]


def test_the_rewards_of_a_curve_that_rises_and_falls() -> None:
    rewards = [0.0] * 3 + [0.2] * 7 + [0.8] * 10 + [0.1] * 10
    found = outcome_of(lines(rewards))
    assert (found.start, found.final, found.steps) == (0.0, pytest.approx(0.1), 30)
    assert found.peak == pytest.approx(0.8)
    assert found.area == pytest.approx(sum(rewards) / 30)
    assert found.collapsed
    assert (found.rollouts, found.seconds) == (240, 45.0), "evaluation is not counted"


def test_the_peak_is_of_ten_steps_and_no_lucky_one() -> None:
    found = outcome_of(lines([0.3] * 12 + [1.0] + [0.3] * 12))
    assert found.peak == pytest.approx(0.37)
    assert not found.collapsed
    assert outcome_of(lines([1.0] + [0.2] * 20)).peak == pytest.approx(0.28)


def test_a_run_shorter_than_the_window_is_its_mean() -> None:
    found = outcome_of(lines([0.2, 0.4]))
    assert found.final == found.peak == found.area == pytest.approx(0.3)


def test_a_step_without_a_verdict_is_left_out_of_the_means_and_leaves_a_gap() -> None:
    found = lines([0.2, None, 0.4], **{"clip/tokens": 0.5})
    assert outcome_of(found).area == pytest.approx(0.3)
    assert outcome_of(found).means["clip_tokens"] == 0.5
    assert "entropy" not in outcome_of(found).means
    assert curves_of(found).values["reward"] == (0.2, None, 0.4)
    with pytest.raises(ValueError, match="judged"):
        outcome_of(lines([None]))


def test_trailing_means_grow_from_the_start() -> None:
    assert trailing([1.0, 3.0, 5.0, 7.0], 2) == [1.0, 2.0, 4.0, 6.0]
