"""Answers older than the weights that they train: by how much, for how long, and exactly again after a kill."""

from __future__ import annotations

import gzip
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gspo
from gspo import cli
from processes import KILLED_WHILE_JUDGING

Line = dict[str, Any]

SHORT: dict[str, Any] = {
    "steps": 7,
    "prompts_per_step": 4,
    "group_size": 4,
    "threads": 1,
    "judging.workers": 1,
    "max_staleness": 2,
    "eval.every": 0,
    "checkpoint.every": 2,
    "optimizer.learning_rate": 3e-3,
    "model.dtype": "float32",
}


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def tiny(folder: Path, **keys: Any) -> Path:
    return gspo.train("tiny", dir=folder, reward=digits, **{**SHORT, **keys}).folder


def journal(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def without_time(lines: list[Line]) -> list[Line]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def rollouts(folder: Path, step: int) -> list[Line]:
    with gzip.open(folder / "rollouts" / f"{step:08d}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def killed(folder: Path, calls: int, keys: dict[str, Any]) -> int:
    words = [sys.executable, "-c", KILLED_WHILE_JUDGING, str(folder), str(calls), json.dumps({**SHORT, **keys})]
    return subprocess.run(words, capture_output=True, timeout=120, env={**os.environ}, check=False).returncode


@pytest.mark.parametrize(
    ("lag", "ages"),
    [(0, [0, 0, 0, 0, 0, 0, 0]), (1, [0, 1, 1, 1, 1, 1, 1]), (3, [0, 1, 2, 3, 3, 3, 3]), (50, [0, 1, 2, 3, 4, 5, 6])],
)
def test_answers_are_as_old_as_asked(lag: int, ages: list[int], tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", max_staleness=lag)
    lines = journal(folder)
    assert [line["staleness/max"] for line in lines] == ages
    assert [line["staleness/mean"] for line in lines] == ages
    for step, age in enumerate(ages, start=1):
        assert {tuple(r["versions"]) for r in rollouts(folder, step)} == {(step - 1 - age, step - 1 - age)}
    draws = [r["ordinal"] for step in range(1, 8) for r in rollouts(folder, step)]
    assert sorted(set(draws)) == list(range(28)), "in the order of the data, and none that no step trains on"
    state = json.loads((folder / "checkpoints" / "00000007" / "state.json").read_text())
    assert (state["position"], state["ahead"]) == (28, 0)
    assert not (folder / "checkpoints" / "00000007" / "ahead.jsonl.gz").exists()


def test_the_answers_are_those_of_the_older_weights(tmp_path: Path) -> None:
    """With answers of version 0 throughout, they are the same whatever the updates did."""
    slow, fast = (
        tiny(tmp_path / name, steps=3, max_staleness=2, **{"optimizer.learning_rate": rate})
        for name, rate in (("slow", 1e-5), ("fast", 1e-2))
    )
    for step in (1, 2, 3):
        a, b = ([(r["ids"], r["logprobs"]) for r in rollouts(folder, step)] for folder in (slow, fast))
        assert a == b
    fresh = tiny(tmp_path / "fresh", steps=3, max_staleness=0, **{"optimizer.learning_rate": 1e-2})
    assert [r["logprobs"] for r in rollouts(fresh, 3)] != [r["logprobs"] for r in rollouts(fast, 3)]


def test_the_ratio_is_to_the_policy_that_the_anchor_names(tmp_path: Path) -> None:
    once = {"algorithm.updates_per_step": 1, "steps": 4}
    old = journal(tiny(tmp_path / "old", **once))
    assert [line["ratio/std_rows"] for line in old] == [0.0] * 4, (
        "to the weights before the step, whoever wrote the answer"
    )
    rollout = journal(tiny(tmp_path / "rollout", **once, **{"algorithm.anchor": "rollout"}))
    assert rollout[0]["ratio/std_rows"] < 1e-5
    assert all(line["ratio/std_rows"] > 1e-4 for line in rollout[1:]), "the lag is in it"


def test_parity_is_measured_only_where_engine_and_trainer_have_the_same_weights(tmp_path: Path) -> None:
    lines = journal(tiny(tmp_path / "run", steps=3))
    assert lines[0]["parity/max"] < 1e-4
    assert [line["parity/mean"] for line in lines[1:]] == [None, None]


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            [],
            "anchor=old: the ratio is to the policy before the step, recomputed by the trainer, and nothing weighs the lag",
        ),
        (["algorithm.anchor=rollout"], "anchor=rollout: the ratio is to the policy that wrote the answers"),
        (
            ["algorithm.correction=token_truncate", "algorithm.correction_band=[2]"],
            "recomputed by the trainer, and correction=token_truncate weighs the lag",
        ),
        (["algorithm=minirl"], "the weight of the gate has the lag in it"),
    ],
)
def test_the_choice_of_the_old_policy_is_said(
    keys: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [
        "train",
        "tiny",
        f"dir={tmp_path / 'run'}",
        "max_staleness=2",
        "steps=1",
        "threads=1",
        "eval.every=0",
        *keys,
    ]
    assert cli.guarded(lambda: cli.app(words)) == 0
    out = capsys.readouterr().out
    start = "max_staleness=2: a step trains on answers written by the weights of 2 steps before, the first 3 steps on those of the start. "
    assert any(line.startswith(f"note: {start}") and said in line for line in out.splitlines())


# A trial call or more, then sixteen answers a step: those of the first three steps in step 1, those of step n + 2 in step n.
@pytest.mark.parametrize(
    ("calls", "keys"),
    [
        (90, {"model.dtype": "bfloat16"}),
        (
            106,
            {
                "engine.weights": "fp8",
                "algorithm.epochs": 2,
                "algorithm.anchor": "rollout",
                "algorithm.routing": "rollout",
                "model": "random-moe",
            },
        ),
    ],
    ids=["bfloat16", "moe-fp8-rollout-epochs"],
)
def test_a_killed_run_goes_on_bit_for_bit(calls: int, keys: dict[str, Any], tmp_path: Path) -> None:
    cut = tmp_path / "cut"
    assert killed(cut, calls, keys) == -signal.SIGKILL
    reached = journal(cut)[-1]["step"]
    checkpoints = sorted(int(p.name) for p in (cut / "checkpoints").glob("0*"))
    assert 2 <= checkpoints[-1] <= reached < 7, "killed between a checkpoint and the end"
    state = json.loads((cut / "checkpoints" / f"{checkpoints[-1]:08d}" / "state.json").read_text())
    assert (state["ahead"], state["position"]) == (2, 4 * (checkpoints[-1] + 2))
    whole = tiny(tmp_path / "whole", **keys)
    gspo.train(resume=cut, reward=digits)
    assert without_time(journal(cut)) == without_time(journal(whole))
    assert len(journal(whole)) == 7
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / "checkpoints" / "00000007" / name) for folder in (whole, cut))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    assert [rollouts(cut, step) for step in range(1, 8)] == [rollouts(whole, step) for step in range(1, 8)]


def test_answers_that_were_lost_from_a_checkpoint_are_missed(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=4)
    for path in (folder / "checkpoints" / "00000004").iterdir():
        path.unlink()
    (folder / "checkpoints" / "00000004").rmdir()
    (folder / "checkpoints" / "00000002" / "ahead.jsonl.gz").unlink()
    with pytest.raises(gspo.InputError, match=r"00000002/ahead\.jsonl\.gz"):
        gspo.train(resume=folder, reward=digits)


def test_a_run_that_is_made_longer_fills_its_queue_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny(tmp_path / "run", steps=4)
    gspo.train(resume=folder, reward=digits, steps=7)
    assert [line["staleness/max"] for line in journal(folder)] == [0, 1, 2, 2, 0, 1, 2]
    assert "answers had been sampled ahead for 4 steps at most" in capsys.readouterr().out


def test_a_step_that_fails_while_it_fills_the_queue_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=4, checkpoint={"every": 1, "keep": 4})
    for path in (folder / "checkpoints" / "00000004").iterdir():
        path.unlink()
    (folder / "checkpoints" / "00000004").rmdir()
    calls = 0

    def breaks_down(completion: str) -> float:
        nonlocal calls
        calls += 1
        if calls > 20:  # after the answers for step 5, among those for step 6
            raise ConnectionError("the service has gone")
        return digits(completion)

    with pytest.raises(gspo.RunError, match="the service has gone"):
        gspo.train(resume=folder, reward=breaks_down, steps=7)
    assert gspo.train(resume=folder, reward=digits, steps=7).step == 7
    draws = [r["ordinal"] for step in range(1, 8) for r in rollouts(folder, step)]
    assert sorted(set(draws)) == list(range(28))
