"""A mixture-of-experts model to whose answers it matters which experts are used, groups that it sampled, and a learner."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import norms
from gspo import PRESETS, Algorithm, config
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.learner import Learner
from gspo.models.load import Policy, load_policy
from gspo.types import Group, Prompt, Reward

ROW = PRESETS["grpo"]
MODES = ("off", "old", "rollout")


class Noise(TorchFunctionMode):
    """Adds noise to the logits of every router: no other softmax here is asked for a type."""

    def __init__(self, size: float) -> None:
        super().__init__()
        self._size, self._generator = size, torch.Generator().manual_seed(0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.softmax and kwargs.get("dtype") is torch.float32:
            noise = torch.randn(args[0].shape, generator=self._generator, dtype=args[0].dtype)
            args = (args[0] + self._size * noise, *args[1:])
        return func(*args, **kwargs)


def moe(dtype: str = "float64", **keys: Any) -> Policy:
    """random-moe with weights ten times as large, so that it matters which experts a token sees."""
    policy = load_policy(config.Model(name="random-moe", dtype=dtype, **keys))  # type: ignore[arg-type]
    with torch.no_grad():
        for p in policy.model.parameters():
            if p.ndim > 1:
                p.mul_(10)
    if dtype == "float64":
        norms.in_float64(policy.model)
    return policy


def sampled(policy: Policy, noise: float = 0.0, prompts: int = 4, answers: int = 4, tokens: int = 8) -> list[Group]:
    engine = LocalEngine(policy, config.Sampling(max_new_tokens=tokens), seed=1, record_routes=True)
    for row in range(prompts):
        text = f"what is {row} + {row}?"
        ids = np.array(policy.tokenizer(text)["input_ids"])
        engine.submit(Request(prompt=Prompt(row, text, ids, {}), ordinal=row, count=answers))
    with Noise(noise):
        groups = sorted(engine.collect(), key=lambda g: g.ordinal)
    return [g.with_rewards([Reward(float((i + g.ordinal) % 3)) for i in range(answers)]) for g in groups]


class Recorder(Learner):
    """Keeps the gradients that the optimizer is given."""

    gradients: dict[str, Tensor]

    def _step(self, tally: Any) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.masters.items() if p.grad is not None}
        return super()._step(tally)


def learner_of(policy: Policy, mode: str, row: Algorithm = ROW, **keys: Any) -> Recorder:
    arguments = dict(temperature=1.0, max_new_tokens=8, total_updates=8, compute_dtype=policy.compute_dtype)
    settings = config.Optimizer(learning_rate=3e-2)
    row = row.model_copy(update={"routing": mode})
    return Recorder(model=policy.model, row=row, settings=settings, **{**arguments, **keys})  # type: ignore[arg-type]
