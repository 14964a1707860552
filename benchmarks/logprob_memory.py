"""Peak memory of the log-probability pass over a large vocabulary, against one tensor of its logits.

In: a `Work`. Out: growth in bytes, and as a share of float32 [tokens, vocabulary]. `ours.py` calls `growth`.
The pass is the learner's own: 8 prompts of 448 tokens with one answer of 64 each, forward, backward and optimizer.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from meter import traced
from transformers import AutoModelForCausalLM, LlamaConfig
from work import Work

from gspo import config, machine
from gspo.batch import make_batches
from gspo.learner import Learner
from gspo.models.load import load_policy
from gspo.models.tiny import tiny_tokenizer
from gspo.objectives import policy_objective
from gspo.presets import Algorithm
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop

_VOCABULARY, _HIDDEN, _TOKENS, _TRAINED = 50_000, 16, 512, 64
# One answer a prompt has no group baseline, so that rewards are compared over the batch.
_ROW = Algorithm(
    name="benchmark",
    ratio="sequence",
    gate="none",
    aggregation="sequence_mean",
    advantage="batch_mean_std",
    updates_per_step=1,
)


def growth(work: Work) -> dict[str, Any]:
    machine.set_threads(work.threads)
    policy = load_policy(config.Model(name=_model(), dtype=work.dtype))
    learner = Learner(
        model=policy.model,
        row=_ROW,
        settings=config.Optimizer(),
        temperature=1.0,
        max_new_tokens=_TRAINED,
        total_updates=2,
        compute_dtype=policy.compute_dtype,
    )
    objective = policy_objective(_ROW)
    _update(learner, objective, _groups(2, 16, 8))  # libraries and optimizer state are there before the meter starts
    groups = _groups(work.prompts, _TOKENS - _TRAINED, _TRAINED)
    before = _memory("VmRSS")
    _forget_peak()
    with traced(work) as trace:
        _update(learner, objective, groups)
    found = _memory("VmHWM") - before
    logits = 4 * work.prompts * _TOKENS * _VOCABULARY
    return {"share": found / logits, "growth_mb": found / 1e6, "logits_mb": logits / 1e6, "profile": trace()}


def _model() -> str:
    torch.manual_seed(0)
    shape: dict[str, Any] = dict(
        vocab_size=_VOCABULARY,
        hidden_size=_HIDDEN,
        intermediate_size=2 * _HIDDEN,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
    )
    tokenizer = tiny_tokenizer()
    folder = Path(tempfile.mkdtemp())
    special = {f"{name}_token_id": getattr(tokenizer, f"{name}_token_id") for name in ("pad", "bos", "eos")}
    AutoModelForCausalLM.from_config(LlamaConfig(**shape, **special), dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def _groups(count: int, prompt: int, answer: int) -> list[Group]:
    draw = np.random.default_rng(0)
    groups = []
    for i in range(count):
        ids = draw.integers(4, _VOCABULARY, prompt + answer)
        segment = Segment(ids[prompt:], np.ones(answer, dtype=bool), np.full(answer, -10.0, dtype=np.float32))
        rollout = Rollout(0, (segment,), "", Stop.LENGTH, (0, 0), Reward(float(i)))
        groups.append(Group(Prompt(i, "prompt", ids[:prompt], {}), i, (rollout,)))
    return groups


def _update(learner: Learner, objective: Any, groups: list[Group]) -> None:
    (batch,) = learner.annotate(make_batches(groups, _ROW, config.Run().max_tokens_per_microbatch))
    stats = learner.update(batch, objective)
    expected = sum(r.policy_tokens for g in groups for r in g.rollouts)
    if stats.trained_tokens != expected:
        raise SystemExit(f"{expected} tokens should have been trained on, {stats.trained_tokens} were")


def _memory(key: str) -> int:
    """A line of the kernel's account of this process, in bytes."""
    found = re.search(rf"^{key}:\s+(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)
    if found is None:
        raise SystemExit("this row reads /proc/self/status, which only Linux has")
    return int(found[1]) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")
