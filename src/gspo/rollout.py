"""Draws of prompts in, judged groups out: engine and reward behind one call.

`job` calls it for training, `evaluate` for held-out prompts.
"""

from __future__ import annotations

from collections.abc import Sequence

from gspo.engines.engine import Engine, Request
from gspo.rewards.load import RewardFunction
from gspo.rewards.score import score
from gspo.types import Group


def rollout(engine: Engine, requests: Sequence[Request], reward: RewardFunction) -> list[Group]:
    """The judged groups, in the order of the requests. Groups are judged as they complete."""
    for request in requests:
        engine.submit(request)
    groups = {group.ordinal: score(reward, group) for group in engine.collect()}
    return [groups[request.ordinal] for request in requests]
