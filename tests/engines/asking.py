"""Small models with something to say, prompts for them, and an engine that answers."""

from __future__ import annotations

from typing import Any

import torch
from chains import ask

from gspo.config import Model, Sampling
from gspo.engines.engine import Engine, Request
from gspo.engines.local import LocalEngine
from gspo.models.load import Policy, load_policy
from gspo.types import Group

UNEVEN = [[7], list(range(3, 58)) * 3, [11, 30, 12], [40] * 70]
"""Prompts of 1, 165, 3 and 70 tokens."""
PROMPTS = [[5, 9, 20], [7], [11, 30, 12, 33, 14, 15, 40, 41, 42], [8, 8], [21, 22, 23, 24, 25]]


def named(name: str, dtype: str = "float64") -> Policy:
    """A tiny model with weights ten times as large, so that what it sees matters to what it says."""
    policy = load_policy(Model(name=name, dtype=dtype))
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim > 1:
                p.mul_(10)
    return policy


def answers(policy: Policy, requests: list[Request], seed: int = 0, **sampling: Any) -> list[Group]:
    engine: Engine = LocalEngine(policy, Sampling(**{"max_new_tokens": 12, **sampling}), seed=seed)
    for request in requests:
        engine.submit(request)
    return list(engine.collect())


def requests(count: int = 5, **keys: Any) -> list[Request]:
    return [ask(ids, count, ordinal=i, **keys) for i, ids in enumerate(PROMPTS)]
