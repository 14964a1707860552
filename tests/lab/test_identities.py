"""Gradients of all rows on real batches: equal where they must be, apart where they must be."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from gspo.lab import identities
from gspo.lab.outcome import CONTROL, ON_POLICY, TOKEN
from gspo.presets import PRESETS


def test_the_gradients_of_a_real_run(tmp_path: Path) -> None:
    words = ["tiny", f"dir={tmp_path / 'run'}", "steps=2", "threads=1", "model.dtype=float64", "eval.every=0"]
    words += ["sampling.max_new_tokens=6", "reward=regex:[0-9]", "max_tokens_per_microbatch=100"]
    identities.main(words)
    gaps = json.loads((tmp_path / "run" / "gaps.json").read_text())
    assert {name.removeprefix(ON_POLICY) for name in gaps if name.startswith(ON_POLICY)} == set(PRESETS)
    equal = {name: gap for name, gap in gaps.items() if name != CONTROL}
    assert all(gap < 1e-6 for gap in equal.values()), equal
    assert gaps[TOKEN] < 1e-12
    assert gaps[CONTROL] > 1e-2, "off policy GRPO and GSPO differ"
    journal = [json.loads(text) for text in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert [line["step"] for line in journal] == [1, 2]
    assert all(line["weights/changed"] > 0.9 for line in journal), "it trains all the same"


def test_distance_is_relative_and_sees_one_sided_zeros() -> None:
    one, zero = torch.ones(4, dtype=torch.float64), torch.zeros(4, dtype=torch.float64)
    assert identities.distance(one * 1.5, one) == 0.5
    assert identities.distance(zero, zero) == 0.0
    assert identities.distance(one, zero) == 1.0
