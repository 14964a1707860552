"""Whole runs on a tiny model: what a run leaves behind, how it goes on, and what it says."""

from __future__ import annotations

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import gspo
from gspo import settings
from gspo.console import plan, sparkline
from gspo.errors import InputError
from gspo.place import new_folder

Line = dict[str, Any]
SHORT: dict[str, Any] = dict(steps=3, prompts_per_step=4, group_size=4, threads=1)


def digits(completion: str) -> float:
    """Share of the answer that is digits: there is signal from the first step on."""
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def tiny(folder: Path, **keys: Any) -> Any:
    return gspo.train("tiny", dir=str(folder), **{**SHORT, "reward": digits, **keys})


def journal(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def without_time(lines: list[Line]) -> list[Line]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def rollouts(folder: Path, step: int) -> list[Line]:
    with gzip.open(folder / "rollouts" / f"{step:08d}.jsonl.gz", "rt") as file:
        return [json.loads(line) for line in file]


def test_a_run_leaves_what_others_can_read(tmp_path: Path) -> None:
    result = tiny(tmp_path / "run", model={"name": "random-dense", "dtype": "float32"})
    folder = result.folder
    lines = journal(folder)
    assert [line["step"] for line in lines] == [1, 2, 3]
    fixed = (
        "reward/mean",
        "groups/signal",
        "groups/total",
        "clip/rows",
        "parity/mean",
        "parity/max",
        "parity/signed",
        "grad_norm",
    )
    assert all(isinstance(line[key], int | float) for line in lines for key in fixed)
    assert all(line["parity/max"] < 1e-4 for line in lines)
    assert all(line["reward/digits/mean"] == line["reward/mean"] for line in lines)
    assert all(
        line["reward/failed"] == line["reward/digits/failed"] == 0 < line["time/reward/digits"] for line in lines
    )
    assert isinstance(lines[-1]["eval/reward"], float)
    assert lines[0]["eval/start/reward"] == result.start_reward

    checkpoint = folder / "checkpoints" / "00000003"
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    saved = load_file(checkpoint / "model.safetensors")
    assert {t.dtype for t in saved.values()} == {torch.float32}, "checkpoints hold the masters"
    prompt = tokenizer("user: what is 1 + 2?", return_tensors="pt").input_ids
    assert model(prompt).logits.isfinite().all()

    run = settings.load(folder / "run.yaml")
    assert (run.steps, run.algorithm.name, run.sampling.temperature) == (3, "gspo", 1.0)
    assert "sha256" in (folder / "run.yaml").read_text()


def test_a_rollout_file_holds_every_answer_with_its_numbers(tmp_path: Path) -> None:
    tiny(tmp_path / "run", steps=1)
    rows = rollouts(tmp_path / "run", 1)
    assert len(rows) == 16
    assert {(r["ordinal"], r["index"]) for r in rows} == {(o, i) for o in range(4) for i in range(4)}
    for row in rows:
        assert len(row["ids"]) == len(row["logprobs"]) == len(row["mask"])
        assert row["reward"] == pytest.approx(digits(row["text"]))
    for ordinal in range(4):
        group = [r for r in rows if r["ordinal"] == ordinal]
        assert sum(r["advantage"] for r in group) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(dtype: str, tmp_path: Path) -> None:
    """NVIDIA-NeMo/RL#3171, huggingface/open-r1#450: moments, schedule or data position lost on resume."""
    keys: dict[str, Any] = dict(
        model={"name": "random-dense", "dtype": dtype},
        steps=6,
        optimizer={"learning_rate": 3e-3, "schedule": "linear", "warmup_updates": 3},
        checkpoint={"every": 2, "keep": 3},
        eval={"every": 3, "limit": 8},
    )
    whole = tiny(tmp_path / "whole", **keys).folder
    cut = tiny(tmp_path / "cut", **keys).folder
    for late in ("00000006", "00000003"):  # as if it had been killed in step 5: the best, of step 3, stays where it is
        if late == "00000006":
            for path in (cut / "checkpoints" / late).iterdir():
                path.unlink()
            (cut / "checkpoints" / late).rmdir()
    again = gspo.train(resume=cut, reward=digits)
    assert again.step == 6
    assert without_time(journal(cut)) == without_time(journal(whole))
    for name in ("model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / "checkpoints" / "00000006" / name) for folder in (whole, cut))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name
    assert rollouts(cut, 6) == rollouts(whole, 6)
    aside = cut / "set-aside-1"
    assert [line["step"] for line in journal(aside)] == [5, 6], "lines past the checkpoint are kept beside the run"


def test_a_half_checkpoint_is_never_picked(tmp_path: Path) -> None:
    """verl-project/verl#4873."""
    # The guard keeps checkpoints of its own beside these.
    folder = tiny(tmp_path / "run", guard="off", checkpoint={"every": 1, "keep": 2}, eval={"every": 0}).folder
    broken = folder / "checkpoints" / "00000009"
    broken.mkdir()
    (broken / "model.safetensors").write_bytes(b"half")
    with pytest.raises(gspo.InputError, match=r"00000009.state\.json is damaged"):  # a save is whole or not at all
        gspo.train(resume=folder, reward=digits, steps=4)
    shutil.rmtree(broken)
    assert gspo.train(resume=folder, reward=digits, steps=4).step == 4
    assert sorted(p.name for p in (folder / "checkpoints").glob("0000000[0-8]")) == ["00000003", "00000004"]


def test_the_best_checkpoint_outlives_the_newest_ones(tmp_path: Path) -> None:
    folder = tiny(
        tmp_path / "run",
        steps=4,
        guard="off",  # which would take this for a collapse
        checkpoint={"every": 1, "keep": 1},
        eval={"every": 1, "limit": 8, "reward": worse_each_time()},
        judging={"workers": 1},  # each has a count of its own
    ).folder
    assert (folder / "best").resolve().name == "00000001"
    assert sorted(p.name for p in (folder / "checkpoints").iterdir()) == ["00000001", "00000004"]


def worse_each_time() -> Any:
    calls = iter(range(10**6))

    def reward(completion: str) -> float:
        return -float(next(calls))

    return reward


def test_a_folder_with_a_run_is_not_written_over(tmp_path: Path) -> None:
    tiny(tmp_path / "run", steps=1)
    with pytest.raises(gspo.InputError, match="resume="):
        tiny(tmp_path / "run", steps=1)


def test_resume_refuses_to_become_another_run(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=1).folder
    with pytest.raises(gspo.InputError, match="seed"):
        gspo.train(resume=folder, seed=3)
    with pytest.raises(gspo.InputError, match="no run to resume"):
        gspo.train(resume=tmp_path)


def test_a_row_of_ones_own_runs_like_ours(tmp_path: Path) -> None:
    row = gspo.Algorithm(
        name="mine", ratio="sequence", gate="clip", clip_low=1e-3, clip_high=1e-3, aggregation="token_mean",
        advantage="leave_one_out", updates_per_step=2,
    )  # fmt: skip
    folder = tiny(tmp_path / "run", algorithm=row).folder
    assert [line["updates/done"] for line in journal(folder)] == [2, 2, 2]
    assert settings.load(folder / "run.yaml").algorithm == row


def test_rows_from_python_with_their_own_held_out_rows(tmp_path: Path) -> None:
    rows = [{"prompt": f"say {i}", "answer": str(i)} for i in range(6)]
    notes = tmp_path / "notes"

    def reward(completion: str, answer: str) -> float:
        with notes.open("a") as file:
            file.write(f"{answer}\n")
        return digits(completion)

    result = tiny(tmp_path / "run", data=rows, eval_data=[{"prompt": "say 9", "answer": "nine"}], reward=reward)
    seen = set(notes.read_text().split())
    assert "nine" in seen
    assert seen <= {*map(str, range(6)), "nine"}
    assert result.last_reward is not None


def test_one_update_a_step_is_said_to_make_clipping_inactive(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    gspo_run, grpo_run = (
        tiny(
            tmp_path / name,
            algorithm={"name": name, "updates_per_step": 1},
            model={"name": "random-dense", "dtype": "float64"},
        )
        for name in ("gspo", "grpo")
    )
    assert "clipping is inactive, and GSPO equals GRPO" in capsys.readouterr().out
    a, b = (load_file(run.folder / "checkpoints" / "00000003" / "model.safetensors") for run in (gspo_run, grpo_run))
    for key in a:
        torch.testing.assert_close(a[key], b[key], rtol=1e-9, atol=1e-12)


def test_a_loss_of_zero_on_policy_is_said_to_be_one_that_learns(tmp_path: Path) -> None:
    """P40: users stop healthy runs for it. Its other causes: below, and `test_a_gradient_that_reaches_nothing_stops_the_run`."""
    keys: dict[str, Any] = {**SHORT, "steps": 1, "group_size": 8, "eval": {"every": 0}}
    (line,) = journal(gspo.train("sort", dir=tmp_path / "run", algorithm={"updates_per_step": 1}, **keys).folder)
    assert abs(line["loss"]) < 1e-6 < line["grad_norm"]
    assert "the loss is 0 on policy" in line["verdict"]


def test_a_step_without_signal_changes_nothing_and_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """NVIDIA-NeMo/RL#4158, huggingface/trl#3452: 'loss 0.0' must say why."""
    folder = tiny(tmp_path / "run", steps=4, reward=lambda completion: 1.0).folder
    lines = journal(folder)
    start = AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / "00000004").state_dict()
    fresh = gspo_tiny_weights()
    assert all(torch.equal(start[key], fresh[key]) for key in fresh)
    assert [line["groups/all_right"] for line in lines] == [4, 4, 4, 4]
    assert [line["updates/done"] for line in lines] == [0, 0, 0, 0]
    assert "no update was made" in lines[0]["verdict"]
    assert not lines[0]["verdict/warning"]
    assert "3 steps in a row" in lines[2]["verdict"]
    assert lines[2]["verdict/warning"]
    assert "nan" not in (folder / "journal.jsonl").read_text().lower()
    assert "no signal: 0 of 4 groups carry any (4 all right)" in capsys.readouterr().out


def gspo_tiny_weights() -> dict[str, torch.Tensor]:
    from gspo.models.tiny import tiny_dense

    return tiny_dense()[0].state_dict()  # type: ignore[no-any-return]


def test_an_answer_that_is_always_cut_is_said(tmp_path: Path) -> None:
    """huggingface/trl#4358."""
    never_ends = tiny(tmp_path / "run", sampling={"max_new_tokens": 2})
    lines = journal(never_ends.folder)
    assert lines[0]["truncated/share"] > 0.5
    assert "raise sampling.max_new_tokens" in lines[0]["verdict"]


def test_top_p_is_said_to_open_a_gap(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny(tmp_path / "run", steps=1, sampling={"max_new_tokens": 4, "top_p": 0.9})
    assert "truncated distribution" in capsys.readouterr().out


def test_the_plan_says_the_batch_once() -> None:
    run = settings.load(None, ["prompts_per_step=3", "group_size=5", "algorithm.updates_per_step=1", "steps=7"])
    assert plan(run).startswith("3 prompts x 5 answers = 15 rollouts a step; 1 update of 15 answers")


def test_the_sparkline_spans_its_values() -> None:
    assert sparkline([0.0, 0.5, 1.0]) == "▁▅█"
    assert sparkline([2.0, 2.0]) == "▁▁"


def test_sigterm_saves_and_ends_with_143(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ["train", "tiny", f"dir={folder}", "steps=100000", "threads=1", "checkpoint.every=0", "eval.every=0"]
    process = subprocess.Popen(
        [sys.executable, "-m", "gspo.cli", *words], stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    deadline = time.monotonic() + 120
    while not (folder / "journal.jsonl").exists() and time.monotonic() < deadline:
        time.sleep(0.2)
    process.send_signal(signal.SIGTERM)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 143, out
    step = journal(folder)[-1]["step"]
    assert (folder / "checkpoints" / f"{step:08d}" / "state.json").exists()
    assert "SIGTERM" in out


@pytest.mark.parametrize("folder", ["/proc/foo", __file__, f"{__file__}/x"])
def test_a_folder_that_takes_nothing_is_refused_at_once(folder: str) -> None:
    with pytest.raises(InputError, match=f"dir={folder}: .* is not a folder that can be written to"):
        new_folder(settings.load("tiny", [f"dir={folder}"]))
