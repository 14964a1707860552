"""A band sized from the mismatch: never narrower than the paper's, as wide as its rule says, and used by the run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

import gspo
from gspo import settings
from gspo.algorithms.bands import sized
from gspo.presets import PRESETS, Algorithm, resolve

AUTO = {"clip_low": "auto", "clip_high": "auto", "anchor": "rollout"}
ROW = resolve("gspo", AUTO)


def band(log_ratio: list[float]) -> tuple[float, float]:
    row = sized(ROW, torch.tensor(log_ratio))
    assert isinstance(row.clip_low, float)
    assert isinstance(row.clip_high, float)
    return row.clip_low, row.clip_high


def test_without_mismatch_it_is_the_papers_band() -> None:
    assert band([0.0] * 64) == (3e-4, 4e-4)
    assert band([1e-4, -1e-4] * 32) == (3e-4, 4e-4)


@given(st.lists(st.floats(-0.5, 0.5, width=32), min_size=1, max_size=200))
def test_the_rule(log_ratio: list[float]) -> None:
    low, high = band(log_ratio)
    width = 2 * float(np.quantile(np.abs(np.array(log_ratio, dtype=np.float64)), 0.9))
    assert low == pytest.approx(max(3e-4, width), rel=1e-6)
    assert high == pytest.approx(max(4e-4, width * 4 / 3), rel=1e-6)
    assert band([-x for x in log_ratio[::-1]]) == (low, high)


def test_one_strange_answer_does_not_open_the_band() -> None:
    usual = [0.004, -0.004] * 32
    assert band([*usual, 5.0]) == band(usual)


def test_the_mismatch_alone_loses_few_answers() -> None:
    """Measured: an engine in fp8 whose answers are off by .004 in the median; the paper's band would lose nearly all."""
    log_ratio_S = torch.randn(512, generator=torch.Generator().manual_seed(0)).double() * 0.006
    row = sized(ROW, log_ratio_S)
    assert isinstance(row.clip_low, float)
    ratio_S = log_ratio_S.exp()
    assert (ratio_S < 1 - row.clip_low).double().mean() < 0.01
    assert (ratio_S < 1 - 3e-4).double().mean() > 0.4


def test_a_band_in_numbers_is_left_alone_and_so_is_a_step_without_answers() -> None:
    assert sized(PRESETS["gspo"], torch.ones(9)) is PRESETS["gspo"]
    assert sized(ROW, torch.zeros(0)) is ROW


@pytest.mark.parametrize(
    ("name", "keys", "reason"),
    [
        ("gspo", {**AUTO, "anchor": "old"}, "set anchor=rollout"),
        ("gspo", {"clip_low": "auto", "anchor": "rollout"}, "go together"),
        ("grpo", AUTO, "not that of gate=clip with ratio=token"),
        ("gspo", {**AUTO, "clip_high": "wide"}, "clip_high"),
        ("gspo", {**AUTO, "clip_low": -1.0}, "greater than or equal to 0"),
    ],
)
def test_where_it_makes_no_sense_it_is_refused(name: str, keys: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValidationError, match=reason):
        resolve(name, keys)


def test_it_can_be_written_down_and_read_back() -> None:
    assert Algorithm(**ROW.model_dump()) == ROW
    run = settings.load(None, ["algorithm.clip_low=auto", "algorithm.clip_high=auto", "algorithm.anchor=rollout"])
    assert run.algorithm == ROW
    assert gspo.presets.advice(ROW) == []


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def test_a_run_sizes_its_band_at_each_step(tmp_path: Path) -> None:
    given: dict[str, Any] = dict(steps=3, prompts_per_step=4, group_size=4, threads=1, reward=digits)
    given |= {"eval.every": 0, "engine.weights": "fp8", "model.dtype": "float32", "sampling.max_new_tokens": 8}
    given |= {f"algorithm.{key}": value for key, value in AUTO.items()}
    folder = gspo.train("tiny", dir=tmp_path / "run", **given).folder
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert all(line["clip/band"] > 1e-3 for line in lines), "the engine's rounding is in the ratio, and so in the band"
    assert len({line["clip/band"] for line in lines}) == 3
    assert lines[0]["parity/tokens"] == lines[0]["tokens/trained"], "measured on all answers before the first update"
    fixed = gspo.train(
        "tiny", dir=tmp_path / "fixed", **{**given, "algorithm.clip_low": 3e-4, "algorithm.clip_high": 4e-4}
    )
    paper = [json.loads(line) for line in (fixed.folder / "journal.jsonl").read_text().splitlines()]
    assert paper[1]["clip/rows"] > lines[1]["clip/rows"]
    same = gspo.train("tiny", dir=tmp_path / "same", **given | {"engine.weights": "same", "steps": 1}).folder
    line = json.loads((same / "journal.jsonl").read_text())
    assert line["clip/band"] == pytest.approx(3e-4), "engine and trainer agree"


def test_a_band_as_wide_as_a_lag_is_refused() -> None:
    words = [f"algorithm.{key}={value}" for key, value in AUTO.items()]
    with pytest.raises(
        gspo.InputError, match=r"max_staleness=1: .* give algorithm.clip_low and algorithm.clip_high numbers"
    ):
        settings.load(None, [*words, "max_staleness=1"])
