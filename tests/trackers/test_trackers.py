"""Trackers beside a run: the real packages get the journal's numbers, and bad ones change nothing (P38).

wandb/wandb#1287, #6625, verl-project/verl#3418.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sqlite3
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import gspo
from gspo import settings
from gspo.trackers.feed import numbers
from gspo.trackers.side import Trackers
from processes import all_gone, marked

SHORT: dict[str, Any] = dict(steps=4, prompts_per_step=4, group_size=4, threads=1, eval={"every": 0})
NUMBERS = {"reward/mean": 0.25, "pass@1": 0.5, "routing/layers": [0.1, 0.2], "verdict": "learning", "loss": None}


@pytest.fixture
def finished(tmp_path: Path) -> Path:
    """The folder of a run of three steps."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "run.yaml").write_text(yaml.safe_dump({"seed": 3, "model": {"name": "random-dense"}}))
    lines = [{"format": 1, "step": step, **NUMBERS, "reward/mean": 0.25 * step} for step in (1, 2, 3)]
    (folder / "journal.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def fed(name: str, folder: Path, after: int = 0) -> list[str]:
    said: list[str] = []
    Trackers([name], folder, after=after, say=said.append).close()
    return said


def test_what_a_tracker_gets_are_finite_numbers() -> None:
    line = {"format": 1, "step": 2, **NUMBERS, "bad": float("nan"), "verdict/warning": False}
    expected = {"reward/mean": 0.25, "pass@1": 0.5, "routing/layers/0": 0.1, "routing/layers/1": 0.2}
    assert numbers(line) == {**expected, "verdict/warning": 0.0}


def test_tensorboard_has_every_step(finished: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert fed("tensorboard", finished) == []
    events = EventAccumulator(str(finished / "trackers" / "tensorboard"))
    events.Reload()
    key = "reward/mean"
    found = (
        [(e.step, e.tensor_proto.float_val[0]) for e in events.Tensors(key)] if key in events.Tags()["tensors"] else []
    )
    assert found == [(1, 0.25), (2, 0.5), (3, 0.75)]


def test_wandb_offline_keeps_every_step(finished: Path) -> None:
    pytest.importorskip("wandb")
    assert fed("wandb:offline", finished) == []
    (kept,) = finished.glob("trackers/wandb/offline-run-*/run-*.wandb")
    data = kept.read_bytes()
    assert b"reward/mean" in data
    assert all(str(value).encode() in data for value in (0.25, 0.5, 0.75))
    assert (finished / "trackers" / "wandb.id").read_text() in kept.name


def test_mlflow_keeps_every_step(finished: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    assert fed("mlflow", finished) == []
    (kept,) = finished.glob("trackers/mlflow/*/*/metrics/reward/mean")
    assert [line.split()[1:] for line in kept.read_text().splitlines()] == [["0.25", "1"], ["0.5", "2"], ["0.75", "3"]]
    assert list(finished.glob("trackers/mlflow/*/*/metrics/pass_at_1"))


def test_trackio_keeps_every_step(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    assert fed("trackio", finished) == []
    (database,) = (tmp_path / "trackio").rglob("gspo.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("select step, metrics from metrics order by step").fetchall()
    assert [(step, json.loads(plain)["reward/mean"]) for step, plain in rows] == [(1, 0.25), (2, 0.5), (3, 0.75)]


OWN = """
import json, time
class Tracker:
    def __init__(self, about):
        self.file = about.store / "taken.jsonl"
        {start}
    def log(self, step, numbers):
        {log}
        with self.file.open("a") as file:
            file.write(json.dumps([step, numbers["reward/mean"]]) + "\\n")
    def finish(self):
        {finish}
"""


def own(folder: Path, start: str = "pass", log: str = "pass", finish: str = "pass") -> str:
    path = folder / "mine.py"
    path.write_text(OWN.format(start=start, log=log, finish=finish))
    return f"{path}:Tracker"


def test_a_class_of_ones_own_goes_on_after_the_steps_it_was_told(finished: Path, tmp_path: Path) -> None:
    assert fed(own(tmp_path), finished, after=1) == []
    taken = (finished / "trackers" / "taken.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in taken] == [[2, 0.5], [3, 0.75]]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ({"start": "raise RuntimeError('no network')"}, "could not be started: RuntimeError: no network"),
        ({"log": "assert step != 3, 'gone'"}, "step 3 was not taken: AssertionError: gone"),
        ({"log": "time.sleep(60 if step == 3 else 0)"}, "was still at step 3"),
        ({"log": "while step == 3: pass"}, "was still at step 3"),
        ({"finish": "time.sleep(3600)"}, "was still at its end"),
        ({"finish": "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"}, "was still at its end"),
    ],
)
def test_a_bad_tracker_costs_one_warning_and_a_second(
    fault: dict[str, str], words: str, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A logger whose init raises; whose log raises in step 3; that sleeps a minute; whose finish hangs."""
    monkeypatch.setenv("MARK", mark := os.urandom(8).hex())
    said: list[str] = []
    trackers = Trackers([own(tmp_path, **fault)], finished, after=0, say=said.append)
    until = time.monotonic() + 30
    while not said and trackers._fed[0].at not in ("step 3", "its end") and time.monotonic() < until:
        time.sleep(0.02)
    begun = time.monotonic()
    trackers.close()
    assert time.monotonic() - begun < 8, "a second of waiting, and the time to end a process on a busy machine"
    assert len(said) == 1
    assert words in said[0]
    assert all_gone(mark), marked(mark)


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def test_a_run_with_a_tracker_that_hangs_is_the_run_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    without = gspo.train("tiny", dir=tmp_path / "without", reward=digits, **SHORT).folder
    tracker = own(tmp_path, log="time.sleep(60)")
    beside = gspo.train("tiny", dir=tmp_path / "with", reward=digits, trackers=tracker, **SHORT).folder
    lines = [[json.loads(line) for line in (f / "journal.jsonl").read_text().splitlines()] for f in (without, beside)]
    plain = [[{k: v for k, v in line.items() if not k.startswith("time/")} for line in each] for each in lines]
    assert plain[0] == plain[1]
    a, b = (load_file(f / "checkpoints" / "00000004" / "model.safetensors") for f in (without, beside))
    assert all(torch.equal(a[key], b[key]) for key in a)
    assert capsys.readouterr().out.count("warning: tracker") == 1


def test_a_missing_package_is_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *rest: None if name == "wandb" else real(name, *rest))
    with pytest.raises(gspo.InputError, match=r"trackers=wandb:offline: .*pip install 'gspo\[wandb\]'"):
        gspo.train("tiny", dir=tmp_path / "run", trackers=["wandb:offline"], **SHORT)
    assert not (tmp_path / "run").exists()


def test_trackers_are_named_in_words() -> None:
    assert settings.load(None, ["trackers=[tensorboard, wandb:offline]"]).trackers == ("tensorboard", "wandb:offline")
    assert settings.load(None, ["trackers=mlflow"]).trackers == ("mlflow",)
    with pytest.raises(gspo.InputError, match=r"trackers: no tracker 'tensorbord'\. Did you mean 'tensorboard'"):
        settings.load(None, ["trackers=tensorbord"])
