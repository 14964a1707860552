"""The distance from the start, measured on answers that the start wrote."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import norms
from gspo import config
from gspo.drift import kl_to_start, read_start, sample_start
from gspo.engines.local import LocalEngine
from gspo.errors import InputError
from gspo.learner import Learner
from gspo.models.load import Policy
from gspo.models.tiny import tiny_dense
from gspo.presets import PRESETS
from gspo.types import Prompt


def prompts(policy: Policy, count: int) -> list[Prompt]:
    texts = [f"what is {row} + {row}?" for row in range(count)]
    return [Prompt(i, text, np.array(policy.tokenizer(text)["input_ids"]), {}) for i, text in enumerate(texts)]


def test_it_is_the_mean_of_log_start_less_log_now_over_the_start_s_tokens(policy: Policy, tmp_path: Path) -> None:
    asked = prompts(policy, 5)
    engine = LocalEngine(policy, config.Sampling(max_new_tokens=6, temperature=0.7), seed=3)
    start = sample_start(engine, asked, tmp_path)
    learner = Learner(
        model=policy.model, row=PRESETS["gspo"], settings=config.Optimizer(), temperature=0.7, max_new_tokens=6,
        total_updates=1, compute_dtype=policy.compute_dtype,
    )  # fmt: skip
    assert kl_to_start(learner, start, 64) == pytest.approx(0.0, abs=1e-6)  # kept in float32
    with torch.no_grad():
        for p in policy.model.parameters():
            p += 0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1), dtype=p.dtype)
    plain = tiny_dense()[0].double()
    norms.in_float64(plain)
    plain.load_state_dict(policy.model.state_dict())
    gaps = []
    for group in start:
        (segment,) = group.rollouts[0].segments
        ids = torch.tensor(np.concatenate([group.prompt.token_ids, segment.token_ids]))[None]
        logits = plain(ids).logits[0, len(group.prompt.token_ids) - 1 : -1].double() / 0.7
        now = logits.log_softmax(-1).gather(1, torch.tensor(segment.token_ids)[:, None])[:, 0]
        gaps += (torch.tensor(segment.logprobs).double() - now).tolist()
    found = kl_to_start(learner, start, 64)
    assert found == pytest.approx(np.mean(gaps), abs=1e-6)
    assert found > 0.01
    assert kl_to_start(learner, read_start(tmp_path, asked), 64) == found, "a resumed run measures the same"
    assert kl_to_start(learner, [], 64) is None


def test_weights_that_give_no_number_are_infinitely_far(policy: Policy, tmp_path: Path) -> None:
    asked = prompts(policy, 2)
    start = sample_start(LocalEngine(policy, config.Sampling(max_new_tokens=4), seed=3), asked, tmp_path)
    learner = Learner(
        model=policy.model, row=PRESETS["gspo"], settings=config.Optimizer(), temperature=1.0, max_new_tokens=4,
        total_updates=1, compute_dtype=policy.compute_dtype,
    )  # fmt: skip
    next(iter(policy.model.parameters())).data.fill_(float("nan"))
    assert kl_to_start(learner, start, 64) == float("inf")


def test_damaged_answers_of_the_start_are_refused(policy: Policy, tmp_path: Path) -> None:
    asked = prompts(policy, 2)
    sample_start(LocalEngine(policy, config.Sampling(max_new_tokens=4), seed=3), asked, tmp_path)
    (tmp_path / "start" / "ahead.jsonl.gz").write_bytes(b"half")
    with pytest.raises(InputError, match="damaged"):
        read_start(tmp_path, asked)
    with pytest.raises(InputError, match="start is missing or damaged"):
        read_start(tmp_path / "none", asked)
