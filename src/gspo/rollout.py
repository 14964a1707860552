"""Draws of prompts in, judged groups out: engine and reward behind one call.

`drawing` calls it for training, `evaluate` for held-out prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo.engines.engine import Engine, Request
from gspo.rewards.score import Scorer
from gspo.types import Group


def rollout(engine: Engine, requests: Sequence[Request], reward: Scorer) -> list[Group]:
    """The judged groups, in the order of the requests. Groups are judged as they complete, while others are sampled.

    Raises RunError as `Judging.finish` does.
    """
    for request in requests:
        engine.submit(request)
    judging = reward.begin()
    for group in engine.collect():
        judging.add(group)
    groups = {group.ordinal: group for group in judging.finish()}
    return [groups[request.ordinal] for request in requests]
