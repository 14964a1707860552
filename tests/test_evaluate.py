"""Evaluation: every row once, means over what was judged, intervals that hold what they promise."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from gspo import config
from gspo.engines.local import LocalEngine
from gspo.evaluate import evaluate, normal_interval, wilson_interval
from gspo.models.load import Policy
from gspo.rewards.call import Call
from gspo.rewards.score import Here, Judge, Scorer
from gspo.types import Prompt

PROMPTS = [Prompt(row, f"p{row}", np.arange(3, 7 + row), {}) for row in range(5)]


def by(function: Callable[[str], float | None]) -> Scorer:
    return Scorer([Judge("by", 1.0, Here(Call(function)))])


@pytest.fixture
def engine(policy: Policy) -> LocalEngine:
    return LocalEngine(policy, config.Sampling(max_new_tokens=4), seed=3)


def test_every_row_is_answered_k_times(engine: LocalEngine) -> None:
    found, groups = evaluate(engine, PROMPTS, by(lambda text: 1.0), samples=3)
    assert [g.prompt.row for g in groups] == [0, 1, 2, 3, 4]
    assert [len(g.rollouts) for g in groups] == [3] * 5
    assert (found.rows, found.samples, found.reward.value, found.pass_at_k.value) == (5, 3, 1.0, 1.0)


def test_two_evaluations_of_the_same_weights_agree_whatever_ran_before(engine: LocalEngine) -> None:
    texts = []
    for extra in (PROMPTS, PROMPTS[:2]):
        evaluate(engine, extra, by(lambda text: 1.0))
        _, groups = evaluate(engine, PROMPTS[2:], by(lambda text: 1.0), samples=2)
        texts.append([r.text for g in groups for r in g.rollouts])
    assert texts[0] == texts[1]


def test_avg_at_k_and_pass_at_k_are_over_rows(engine: LocalEngine) -> None:
    verdicts = iter([1, 0, 0, 0, 1, 1, 0, 0, 0, 0])
    found, _ = evaluate(engine, PROMPTS, by(lambda text: float(next(verdicts))), samples=2)
    assert found.reward.value == pytest.approx(0.3)
    assert found.pass_at_k.value == pytest.approx(0.4)


def test_rows_without_a_verdict_are_counted_and_in_no_mean(engine: LocalEngine) -> None:
    verdicts = iter([1.0, None, None, 0.0, None])
    found, _ = evaluate(engine, PROMPTS, by(lambda text: next(verdicts)))
    assert found.reward.value == pytest.approx(0.5)
    assert found.unjudged == 3


def test_intervals_cover_their_share() -> None:
    """The 95 % interval of a share of .9 on 40 rows holds it in about 95 % of draws, and is never empty at 0 or 1."""
    draws = np.random.default_rng(0).binomial(40, 0.9, 4000)
    inside = [interval.low <= 0.9 <= interval.high for interval in (wilson_interval(int(k), 40) for k in draws)]
    assert 0.92 < np.mean(inside) < 0.98
    assert wilson_interval(40, 40).low < 0.93
    assert wilson_interval(0, 40).high > 0.07
    means = [normal_interval(x) for x in np.random.default_rng(1).normal(2, 1, (2000, 50))]
    assert 0.92 < np.mean([i.low <= 2 <= i.high for i in means]) < 0.97
    assert math.isnan(wilson_interval(0, 0).value)
