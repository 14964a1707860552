"""Passes over a step's rollouts: the same updates again, against the policy from before the first of them."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import gspo
from gspo import settings
from gspo.build import build
from gspo.console import plan
from gspo.job import Job
from gspo.presets import advice
from gspo.types import Group


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def job_of(folder: Path, *words: str) -> Job:
    base = ("steps=2", "threads=1", "eval.every=0", "prompts_per_step=4", "group_size=4", "optimizer.warmup_updates=0")
    return build(settings.load("tiny", [f"dir={folder}", *base, *words], {"reward": digits}))


def logprobs(model: Any, groups: list[Group]) -> Iterator[Tensor]:
    """Of each answer's tokens, by the model's own logits, one sequence at a time."""
    for group in groups:
        for rollout in group.rollouts:
            answer = torch.from_numpy(rollout.segments[0].token_ids)
            ids = torch.cat([torch.from_numpy(group.prompt.token_ids), answer])
            logits = model(input_ids=ids[None], use_cache=False).logits[0, -len(answer) - 1 : -1]
            yield torch.log_softmax(logits, -1).gather(1, answer[:, None])[:, 0]


@torch.no_grad()
def test_every_pass_has_the_ratio_to_the_policy_before_the_step(tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", "model.dtype=float64", "algorithm.updates_per_step=1", "algorithm.epochs=3")
    groups = job.rollout()
    alive = [g for g in groups if len({r.reward.value for r in g.rollouts if r.reward}) > 1]
    assert alive
    seen = [copy.deepcopy(job.policy.model)]
    update = job.learner.update

    def watched(*arguments: Any) -> Any:
        stats = update(*arguments)
        seen.append(copy.deepcopy(job.policy.model))
        return stats

    job.learner.update = watched  # type: ignore[method-assign]
    with torch.enable_grad():
        batches, stats = job.learn(groups)
    assert (len(batches), len(stats), job.learner.updates) == (1, 3, 3)
    for model in seen:
        model.set_attn_implementation("sdpa")
    before = torch.cat(list(logprobs(seen[0], alive)))
    for made, model in zip(stats, seen[:3], strict=True):
        log_ratio_N = torch.cat(list(logprobs(model, alive))) - before
        assert made.tally.log_ratio_tokens_square == pytest.approx(float(log_ratio_N.square().sum()), abs=1e-9)
    assert stats[0].tally.log_ratio_tokens_square == 0.0
    assert stats[1].tally.log_ratio_tokens_square > 1e-6


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("model", ["random-dense", "random-moe"])
def test_the_first_update_of_the_first_pass_has_a_ratio_of_exactly_one(model: str, dtype: str, tmp_path: Path) -> None:
    """Its old log-probabilities come from a pass of their own, which has to give the very numbers of the training pass."""
    words = (f"model.name={model}", f"model.dtype={dtype}", "algorithm.updates_per_step=2", "algorithm.epochs=2")
    job = job_of(tmp_path / "run", *words)
    batches, stats = job.learn(job.rollout())
    assert all(batch.old_logprob_N is not None for batch in batches)
    assert [s.tally.log_ratio_tokens_square == 0.0 for s in stats] == [True, False, False, False]


def test_the_same_updates_in_the_same_order(tmp_path: Path) -> None:
    job = job_of(tmp_path / "run", "algorithm.epochs=2", "algorithm.updates_per_step=4")
    made = []
    update = job.learner.update
    job.learner.update = lambda batch, objective: made.append(batch.key_R) or update(batch, objective)  # type: ignore
    _, stats = job.learn(job.rollout())
    assert made[:4] == made[4:]
    assert len({*made}) == 4
    assert [s.parity.tokens for s in stats[4:]] == [0, 0, 0, 0], "parity is measured once a token"
    assert [s.parity.tokens for s in stats[:4]] == [s.trained_tokens for s in stats[:4]]


def test_a_run_counts_and_schedules_the_updates_of_all_passes(tmp_path: Path) -> None:
    given: dict[str, Any] = dict(steps=2, prompts_per_step=4, group_size=4, threads=1, reward=digits)
    given |= {"eval.every": 0, "optimizer.schedule": "linear", "algorithm.epochs": 3, "algorithm.updates_per_step": 2}
    folder = gspo.train("tiny", dir=tmp_path / "run", **given).folder
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert [line["updates/done"] + line["updates/skipped"] for line in lines] == [6, 6]
    state = json.loads((folder / "checkpoints" / "00000002" / "state.json").read_text())
    assert state["updates"] == sum(line["updates/done"] for line in lines)
    assert lines[-1]["learning_rate"] == pytest.approx(3e-3 * (12 - state["updates"] + 1) / 12)


def test_the_plan_says_how_often() -> None:
    run = settings.load(None, ["algorithm.epochs=4", "steps=5", "prompts_per_step=8", "group_size=8"])
    assert "4 updates of 16 answers, by whole groups, 4 times over; " in plan(run)
    assert plan(run).endswith("5 steps, 80 updates in all")


def test_one_update_made_twice_is_not_said_to_be_on_policy() -> None:
    run = settings.load(None, ["algorithm.updates_per_step=1", "algorithm.epochs=2"])
    assert advice(run.algorithm) == []
