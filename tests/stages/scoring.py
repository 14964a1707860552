"""Reward models small enough to be computed by hand: pairs, jobs, gradients before the optimizer, journals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import norms
from gspo import settings
from gspo.batch import Batch, answers_batch
from gspo.stage_config import RewardRun
from gspo.stages.reward_build import build
from gspo.stages.reward_model import RewardJob, planted, preference

PAIRS: list[dict[str, Any]] = [
    {"prompt": "say one", "chosen": "one", "rejected": "one, or two", "gap": 0.5},
    {"prompt": "say two", "chosen": "two, too", "rejected": "to", "gap": 0.0},
    {"prompt": "say one", "chosen": "a longer one", "rejected": "1", "gap": 2.0},
    {"prompt": "x", "chosen": "y", "rejected": "yy", "gap": 0.25},
]
"""One prompt stands twice; a chosen answer is the beginning of a rejected one; lengths differ."""


def made(
    folder: Path,
    rows: list[dict[str, Any]] | None = None,
    eval_rows: list[dict[str, Any]] | None = None,
    **keys: Any,
) -> RewardJob:
    """A job on the two-layer Llama, in float64 without a chat template unless told otherwise; its score is not zero."""
    model = {"name": "random-dense", "dtype": "float64"} | keys.pop("model", {})
    data = {"source": "python", "template": "none"} | keys.pop("data", {})
    tree = {"dir": str(folder), "threads": 1, "batch_size": 4, "steps": 1, "model": model, "data": data, **keys}
    job = build(settings.check_as(RewardRun, tree, "test"), rows=rows or PAIRS, eval_rows=eval_rows)
    if model["dtype"] == "float64":
        norms.in_float64(job.policy.model)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            job.policy.model.score.weight.copy_(torch.randn(1, 64, generator=generator))
    return job


def batch_of(job: RewardJob, budget: int, order: list[int] | None = None) -> tuple[Batch, Tensor]:
    found = planted([(i, job.pairs[i]) for i in order or sorted(job.pairs)])
    return answers_batch(found.groups, budget, 2), found.margin_P


def gradients(job: RewardJob, batch: Batch, margin_P: Tensor) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradient, before the optimizer: Adam would hide a constant scale."""
    sums = job.learner._accumulate(job.learner.placed(batch), preference(margin_P, job.run.centring, []))
    found = {name: p.grad.clone() for name, p in job.learner.masters.items() if p.grad is not None}
    job.learner.optimizer.zero_grad()
    return sums.loss, found


def by_hand(
    job: RewardJob, pairs: list[dict[str, Any]], margin: str | None, model: Any = None
) -> tuple[float, dict[str, Tensor]]:
    """One sequence at a time through the classifier of transformers: none of our packing, head, loss or rendering.

    `model`: in the place of the job's own.
    """
    model, tokenizer = job.policy.model if model is None else model, job.policy.tokenizer
    model.set_attn_implementation("sdpa")
    total = torch.zeros((), dtype=torch.float64)
    for pair in pairs:
        scores = []
        for key in ("chosen", "rejected"):
            ids = torch.tensor(tokenizer(f"{pair['prompt']}\n\n{pair[key]}")["input_ids"])
            scores.append(model(input_ids=ids[None]).logits[0, 0])
        gap = scores[0] - scores[1] - (pair[margin] if margin else 0.0)
        total = total + torch.log1p(torch.exp(-gap)) + job.run.centring * (scores[0] + scores[1]) ** 2
    model.zero_grad()
    (total / len(pairs)).backward()
    return float(total.detach()) / len(pairs), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]
