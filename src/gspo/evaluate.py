"""Held-out prompts in, a reward with its interval out: the path of training without the learner.

Every row is answered once (or `eval.samples` times) with random numbers that are the same at every
evaluation, so that two evaluations differ by the weights alone. `job` and the command `eval` call it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from gspo import config
from gspo.engines.engine import Engine, Partner, Request
from gspo.rewards.score import Scorer
from gspo.rollout import rollout
from gspo.types import Group, Prompt

EVAL_STREAM = 1
_Z = 1.96  # 95 %


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval over the rows."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    reward: Interval
    """avg@k: mean over rows of the mean over k answers."""
    pass_at_k: Interval
    """Share of rows of which at least one of k answers reached `pass_at`."""
    samples: int
    """k."""
    rows: int
    unjudged: int
    """Rows without any judged answer: in no mean, and counted here."""
    length: float
    """Mean policy tokens of an answer."""
    binary: bool
    """Every judged answer is worth 0 or 1, so that the reward is a share of right answers."""
    groups: tuple[Group, ...] = field(default=(), repr=False)
    """The answers, judged."""


def evaluate(
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: Scorer,
    *,
    samples: int = 1,
    pass_at: float = 1.0,
    greedy: bool = False,
    partner: Partner | None = None,
) -> tuple[Evaluation, list[Group]]:
    """Answer and judge every prompt; greedy takes the likeliest token and one sample."""
    samples = 1 if greedy else samples
    requests = [
        Request(prompt=p, ordinal=p.row, count=samples, stream=EVAL_STREAM, greedy=greedy, partner=partner)
        for p in prompts
    ]
    groups = rollout(engine, requests, reward)
    rewards = [
        [r.reward.value for r in g.judged if r.reward is not None and r.reward.value is not None] for g in groups
    ]
    judged = [np.array(values) for values in rewards if values]
    means = np.array([values.mean() for values in judged])
    passed = np.array([(values >= pass_at).any() for values in judged])
    tokens = [r.policy_tokens for g in groups for r in g.rollouts]
    binary = bool(judged) and all(np.isin(values, (0.0, 1.0)).all() for values in judged)
    return Evaluation(
        reward=_within(0.0, 1.0, normal_interval(means)) if binary else normal_interval(means),
        pass_at_k=wilson_interval(int(passed.sum()), len(passed)),
        samples=samples,
        rows=len(prompts),
        unjudged=len(prompts) - len(judged),
        length=float(np.mean(tokens)),
        binary=binary,
    ), groups


def measure(
    engine: Engine,
    prompts: Sequence[Prompt],
    reward: Scorer,
    settings: config.Eval,
    partner: Partner | None = None,
) -> dict[str, Evaluation]:
    """The evaluations that `settings` asks for, under the prefixes of their journal keys."""
    k, pass_at = settings.samples, settings.pass_at
    found = {"eval": _recorded(*evaluate(engine, prompts, reward, samples=k, pass_at=pass_at, partner=partner))}
    if settings.greedy:
        greedy = evaluate(engine, prompts, reward, pass_at=pass_at, greedy=True, partner=partner)
        found["eval/greedy"] = _recorded(*greedy)
    return found


def _recorded(found: Evaluation, groups: Sequence[Group]) -> Evaluation:
    return replace(found, groups=tuple(groups))


def normal_interval(values: np.ndarray) -> Interval:
    """Mean of row values with its standard error; exact 0/1 rows use `wilson_interval`, which does not vanish at 0 and 1."""
    if len(values) == 0:
        return Interval(math.nan, math.nan, math.nan)
    if np.isin(values, (0.0, 1.0)).all():
        return wilson_interval(int(values.sum()), len(values))
    mean = float(values.mean())
    half = _Z * float(values.std(ddof=1)) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Interval(mean, mean - half, mean + half)


def _within(low: float, high: float, interval: Interval) -> Interval:
    return Interval(interval.value, max(low, interval.low), min(high, interval.high))


def wilson_interval(successes: int, trials: int) -> Interval:
    """Share of successes with Wilson's interval (J. Am. Stat. Assoc. 22, 1927)."""
    if trials == 0:
        return Interval(math.nan, math.nan, math.nan)
    share = successes / trials
    centre = (share + _Z**2 / (2 * trials)) / (1 + _Z**2 / trials)
    half = _Z / (1 + _Z**2 / trials) * math.sqrt(share * (1 - share) / trials + _Z**2 / (4 * trials**2))
    return Interval(share, max(0.0, centre - half), min(1.0, centre + half))
