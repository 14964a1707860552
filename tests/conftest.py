"""Shared by the tests: one CPU thread, and groups of made-up answers of a tiny real model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

import norms
from gspo import config
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.models.load import Policy, load_policy
from gspo.types import Group, Prompt, Reward


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def policy() -> Policy:
    """A two-layer Llama in float64, built in memory."""
    policy = load_policy(config.Model(name="random-dense", dtype="float64"))
    norms.in_float64(policy.model)
    return policy


@pytest.fixture
def sampled() -> Callable[..., list[Group]]:
    """Groups that the policy itself sampled, with rewards that differ inside each."""

    def sample(
        policy: Policy, prompts: int = 4, answers: int = 4, tokens: int = 6, temperature: float = 1.0
    ) -> list[Group]:
        engine = LocalEngine(policy, config.Sampling(max_new_tokens=tokens, temperature=temperature), seed=1)
        for row in range(prompts):
            text = f"what is {row} + {row}?"
            ids = np.array(policy.tokenizer(text)["input_ids"])
            engine.submit(Request(prompt=Prompt(row, text, ids, {}), ordinal=row, count=answers))
        groups = sorted(engine.collect(), key=lambda g: g.ordinal)
        return [g.with_rewards([Reward(float((i + g.ordinal) % 3)) for i in range(answers)]) for g in groups]

    return sample
