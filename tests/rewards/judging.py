"""Rewards put to work as a run does, on groups of given answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from gspo.config import Data, Judging, RewardRule
from gspo.rewards.load import load, open_scorers
from gspo.rewards.ready import Around
from gspo.rewards.score import Scorer
from gspo.tasks.data import read_rows
from gspo.types import Group, Prompt, Rollout, Segment, Stop


def group(row: dict[str, Any], texts: Sequence[str], prompt: str = "Q") -> Group:
    segment = Segment(np.array([1]), np.array([True]), np.zeros(1, np.float32))
    rollouts = tuple(Rollout(i, (segment,), text, Stop.EOS, (0, 0)) for i, text in enumerate(texts))
    return Group(Prompt(0, prompt, np.array([1, 2]), row), ordinal=5, rollouts=rollouts)


@contextmanager
def scorer(rules: Sequence[Any], rows: Sequence[dict[str, Any]], **judging: Any) -> Iterator[Scorer]:
    settings = Judging(**{"workers": 1, "timeout": 5, "max_failed": 1, **judging})
    found = read_rows(Data(), rows=rows)
    listed = [rule if isinstance(rule, RewardRule) else RewardRule(function=rule) for rule in rules]
    around = Around(found, "prompt", None, 100, settings)
    (opened,), pool = open_scorers([(load(listed, around), found)], settings)
    try:
        yield opened
    finally:
        if pool is not None:
            pool.close()


def judge(opened: Scorer, row: dict[str, Any], *texts: str, prompt: str = "Q") -> Group:
    judging = opened.begin()
    judging.add(group(row, texts, prompt))
    return judging.finish()[0]


def values(judged: Group) -> list[float | None]:
    return [r.reward.value for r in judged.rollouts if r.reward is not None]
