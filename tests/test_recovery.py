"""A run that was cut off, moved, damaged or given other data: it goes on exactly, or says why it cannot."""

from __future__ import annotations

import json
import resource
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

import gspo
from gspo import cli, settings
from gspo.build import build
from gspo.config import Run
from gspo.lock import Lock
from gspo.loop import train as loop
from gspo.place import new_folder, resumed_run
from gspo.store import write_run

ROWS = [{"prompt": f"say {i}"} for i in range(6)]


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def tiny(folder: Path, **keys: Any) -> Path:
    given: dict[str, Any] = dict(steps=2, prompts_per_step=4, group_size=4, threads=1, reward=digits, eval={"every": 0})
    return gspo.train("tiny", dir=folder, **{**given, **keys}).folder


def test_a_run_goes_on_only_with_the_rows_it_was_started_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny(tmp_path / "run", data=ROWS, eval={"every": 9})
    assert "no checkpoint is the best: give eval_data=rows" in capsys.readouterr().out
    with pytest.raises(gspo.InputError, match="given from Python"):
        gspo.train(resume=folder, reward=digits, steps=3)
    with pytest.raises(gspo.InputError, match="not those that the run was started with"):
        gspo.train(resume=folder, reward=digits, steps=3, data=ROWS[:3])
    assert gspo.train(resume=folder, reward=digits, steps=3, data=ROWS).step == 3


def test_a_changed_column_is_refused_and_a_changed_reward_file_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train, held, judge = tmp_path / "train.jsonl", tmp_path / "held.jsonl", tmp_path / "judge.py"

    def write(path: Path, answer: str) -> None:
        path.write_text("".join(json.dumps({"prompt": f"{path.stem} {i}", "answer": answer}) + "\n" for i in range(4)))

    write(train, "1")
    write(held, "1")
    judge.write_text("def score(completion, answer):\n    return float(len(completion) % 2)\n")
    folder = tiny(
        tmp_path / "run", data=str(train), eval={"every": 0, "source": str(held)}, reward=f"{judge}:score", steps=1
    )
    for path, said in ((train, "the rows to train on are not"), (held, "the held-out rows are not")):
        write(path, "2")
        with pytest.raises(gspo.InputError, match=said):
            gspo.train(resume=folder, steps=2)
        write(path, "1")
    judge.write_text("def score(completion, answer):\n    return float(len(completion) % 3)\n")
    gspo.train(resume=folder, steps=2)
    assert f"warning: {judge} is not what the run was started with" in capsys.readouterr().out
    judge.write_text("def score(completion, answer):\n    return float(len(completion) % 2)\n")
    gspo.train(resume=folder, steps=3)
    assert "warning" not in capsys.readouterr().out


def test_the_command_line_does_not_guess_a_reward_from_python(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tiny(tmp_path / "run")
    assert cli.guarded(lambda: cli.app(["train", "--resume", str(folder), "steps=3"])) == 2
    assert "given from Python" in capsys.readouterr().err


def test_the_steps_of_a_resumed_run_are_written_down(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run")
    gspo.train(resume=folder, reward=digits, steps=3)
    assert settings.load(folder / "run.yaml").steps == 3
    for steps in ({}, {"steps": 3}, {"steps": 1}):
        with pytest.raises(gspo.InputError, match="has done 3 of"):
            gspo.train(resume=folder, reward=digits, **steps)


def test_a_schedule_that_ends_elsewhere_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny(tmp_path / "run", optimizer={"schedule": "linear"})
    gspo.train(resume=folder, reward=digits, steps=4)
    assert "linear schedule now ends at step 4 instead of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("file", "damage", "part"),
    [
        ("state.json", lambda path: path.write_text("{"), "state.json is damaged"),
        ("state.json", lambda path: path.write_text('{"format": 1, "moon": 3}'), "state.json is damaged"),
        ("state.json", lambda path: path.write_text('{"format": 99}'), "another version of gspo"),
        ("state.json", lambda path: path.unlink(), "state.json is damaged"),
        ("checksums.json", lambda path: path.unlink(), "checksums.json is damaged"),
        ("../../run.yaml", lambda path: path.write_text("steps: ["), "run.yaml: damaged"),
        ("optimizer.safetensors", lambda path: path.unlink(), "without the state of its optimizer"),
        ("optimizer.safetensors", lambda path: path.write_bytes(b"half"), "optimizer.safetensors is damaged"),
        ("model.safetensors", lambda path: path.write_bytes(path.read_bytes()[:500]), "model.safetensors is damaged"),
    ],
)
def test_a_damaged_checkpoint_is_named(file: str, damage: Any, part: str, tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=1)
    damage(folder / "checkpoints" / "00000001" / file)
    with pytest.raises(gspo.InputError, match=part):
        gspo.train(resume=folder, reward=digits, steps=2)


def test_no_tensor_is_made_up(tmp_path: Path) -> None:
    """transformers fills what a file lacks with random numbers."""
    checkpoint = tiny(tmp_path / "run", steps=1) / "checkpoints" / "00000001"
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.0.mlp.down_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(gspo.InputError, match=r"lack 1 tensors .* model\.layers\.0\.mlp\.down_proj\.weight"):
        tiny(tmp_path / "other", model=checkpoint)


def test_a_line_that_was_cut_off_does_not_spoil_the_next(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run")
    with (folder / "journal.jsonl").open("a") as file:
        file.write('{"format": 1, "step": 3, "vers')
    gspo.train(resume=folder, reward=digits, steps=3)
    assert [json.loads(line)["step"] for line in (folder / "journal.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_an_evaluation_without_a_verdict_is_not_the_best(tmp_path: Path) -> None:
    verdicts = iter([None] * 33 + [0.5] * 1000)  # the trial, then 16 prompts before training and after step 1
    folder = tiny(
        tmp_path / "run",
        steps=3,
        reward=lambda completion: digits(completion),
        eval={"every": 1, "reward": lambda completion: next(verdicts)},
        judging={"workers": 1},  # each has an iterator of its own
        checkpoint={"every": 1, "keep": 3},
    )
    assert (folder / "best").resolve().name == "00000002"
    state = json.loads((folder / "best" / "state.json").read_text())
    assert (state["best_reward"], state["best_step"], state["start_reward"]) == (0.5, 2, None)


def test_best_is_put_right_if_the_run_was_killed_before_it_was_marked(tmp_path: Path) -> None:
    keys: dict[str, Any] = dict(eval={"every": 2, "limit": 4}, checkpoint={"every": 1, "keep": 1})
    folder = tiny(tmp_path / "run", **keys)
    (folder / "best").unlink()
    gspo.train(resume=folder, reward=digits, steps=3)
    assert (folder / "best").resolve().name in ("00000002", "00000003")
    assert (folder / "best" / "model.safetensors").is_file()


def test_a_signal_before_the_first_step_leaves_something_to_resume(tmp_path: Path) -> None:
    job = build(settings.load("tiny", [f"dir={tmp_path / 'run'}", "steps=2", "threads=1"]))
    job.stop.by = signal.SIGTERM
    result = loop(job)
    assert (result.step, result.exit_code) == (0, 143)
    assert gspo.train(resume=tmp_path / "run").step == 2


def test_a_disk_that_refuses_leaves_earlier_checkpoints_and_says_so(tmp_path: Path) -> None:
    """verl-project/verl#4873: old checkpoint gone, new one not there."""
    folder = tiny(tmp_path / "run", guard="off", checkpoint={"every": 1, "keep": 1})  # the guard keeps one more
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))  # the weights are larger
    try:
        with pytest.raises(gspo.RunError, match=r"00000003 could not be written .* needs .* and .* are free"):
            gspo.train(resume=folder, reward=digits, steps=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["00000002"]
    assert gspo.train(resume=folder, reward=digits, steps=3).step == 3


def broken(completion: str) -> float:
    return completion.no_such_thing if completion else 0.0  # type: ignore[attr-defined]


def test_a_reward_that_crashes_is_shown_once_with_its_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny(tmp_path / "run", reward=broken, judging={"max_failed": 1})
    out = capsys.readouterr().out
    assert out.count("AttributeError") == 1
    assert "test_recovery.py" in out
    assert "gspo/rewards" not in out
    assert "unjudged 16/16, 16 crashed" in out
    last = json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])
    assert "crashed on 16" in last["verdict"]
    assert (last["reward/mean"], last["reward/broken/mean"], last["reward/broken/failed"]) == (None, None, 1.0)
    assert last["reward/failed"] == 1.0


def test_a_reward_that_begins_to_fail_stops_the_run_and_loses_nothing(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def judge(completion: str) -> float:
        journal = folder / "journal.jsonl"
        if journal.exists() and len(journal.read_text().splitlines()) == 2:
            raise ConnectionError("the service has gone")
        return digits(completion)

    with pytest.raises(gspo.RunError, match=r"judge failed on 16 of 16 answers(.|\n)*the service has gone"):
        tiny(folder, reward=judge, steps=4)
    assert gspo.train(resume=folder, reward=digits, steps=4).step == 4
    steps = [json.loads(line)["step"] for line in (folder / "journal.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert not list(folder.glob("set-aside-*")), "steps 1 and 2 were not done again"


def test_a_run_folder_is_no_model_and_its_checkpoints_are_named(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=1)
    with pytest.raises(gspo.InputError, match="checkpoints/00000001"):
        tiny(tmp_path / "other", model=folder)


def test_a_prompt_without_room_for_an_answer_is_refused_before_the_run_exists(tmp_path: Path) -> None:
    with pytest.raises(gspo.InputError, match=r"2048 positions"):
        tiny(tmp_path / "run", sampling={"max_new_tokens": 100_000})
    assert not (tmp_path / "run").exists()


def test_a_folder_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(gspo.InputError, match="not a folder"):
        tiny(tmp_path / "file" / "run")


def test_a_copy_of_a_run_goes_on_where_it_lies(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run")
    moved = Path(shutil.copytree(folder, tmp_path / "moved", symlinks=True))
    assert gspo.train(resume=moved, reward=digits, steps=3).folder == moved
    assert not (folder / "checkpoints" / "00000003").exists()


def _killed(folder: Path, words: list[str], step: int) -> None:
    """`gspo WORDS dir=FOLDER`, killed once the line of `step` is in its journal."""
    log = folder.parent / "killed.log"
    with log.open("w") as file:
        run = subprocess.Popen([sys.executable, "-m", "gspo.cli", *words, f"dir={folder}"], stdout=file, stderr=file)
    journal, until = folder / "journal.jsonl", time.monotonic() + 120
    while not (journal.exists() and len(journal.read_text().splitlines()) >= step):
        assert time.monotonic() < until, log.read_text()
        assert run.poll() is None, log.read_text()
        time.sleep(0.005)
    run.kill()
    run.wait()


def _said_by(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = cli.guarded(lambda: cli.app(words))
    said = capsys.readouterr()
    return code, said.out + said.err


def _steps(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith("time/")} for line in lines]


_SHORT = ["threads=1", "checkpoint.every=0"]
_STAGES = {
    "train": ["train", "tiny", "prompts_per_step=4", "group_size=4", "eval.every=0", *_SHORT],
    "sft": ["sft", "tiny-dense", "eval.every=0", "batch_size=4", *_SHORT],
    "reward": ["reward", "letters", "eval.every=0", "batch_size=4", *_SHORT],
}


@pytest.mark.parametrize("command", _STAGES)
def test_a_run_killed_before_its_first_checkpoint_begins_anew(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _STAGES[command]
    run, whole = tmp_path / "run", tmp_path / "whole"
    _killed(run, [*words, "steps=200"], 2)  # far from its end, and so from its only checkpoint
    journal = (run / "journal.jsonl").read_text()
    code, said = _said_by([*words, f"dir={run}"], capsys)
    assert code == 2
    assert f"Continue it with `gspo {command} --resume {run}`" in said
    code, said = _said_by([command, "--resume", str(run), "steps=4"], capsys)
    assert code == 0, said
    assert "no checkpoint had been written when this run ended, so it begins anew" in said
    assert f"is set aside in {run / 'set-aside-1'}" in said
    aside = (run / "set-aside-1" / "journal.jsonl").read_text()
    assert [json.loads(line)["step"] for line in aside.splitlines()] == [
        json.loads(line)["step"] for line in journal.splitlines()
    ]
    assert _said_by([*words, "steps=4", f"dir={whole}"], capsys)[0] == 0
    assert _steps(run) == _steps(whole)
    assert len(_steps(run)) == 4


def test_a_run_that_begins_anew_has_to_have_its_rows(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", data=ROWS)
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(gspo.InputError, match="given from Python"):
        gspo.train(resume=folder, reward=digits)
    with pytest.raises(gspo.InputError, match="not those that the run was started with"):
        gspo.train(resume=folder, reward=digits, data=ROWS[:3])
    assert gspo.train(resume=folder, reward=digits, data=ROWS).step == 2


def test_what_a_kill_before_run_yaml_leaves_is_a_free_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "run.lock").write_text("1\n")
    (folder / "run.tmp").write_text("steps: 3")
    assert new_folder(settings.load("tiny", [f"dir={folder}"])) == folder
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(gspo.InputError, match="not empty, and holds no run"):
        new_folder(settings.load("tiny", [f"dir={folder}"]))


def test_a_run_that_is_alive_is_named_by_its_process_before_anything_else(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    run = settings.load("tiny", [f"dir={folder}"])
    write_run(folder, run, {})
    held = Lock(folder)
    with pytest.raises(gspo.InputError, match=r"another process works on this run \(pid "):
        resumed_run(Run, folder, [])
    held.close()
    assert resumed_run(Run, folder, []) == run


def test_a_run_of_python_is_gone_on_with_from_python(tmp_path: Path) -> None:
    """Of a run whose rows or reward the command line does not have."""
    folder = tmp_path / "run"
    python = {"data": "python", "reward": digits, "dir": str(folder)}
    for keys, given in (
        (python, "resume='{}', data=rows, eval_data=rows, reward=function)"),
        ({**python, "data": "addition:1-9"}, "resume='{}', reward=function)"),
        ({**python, "reward": "number"}, "resume='{}', data=rows, eval_data=rows)"),
    ):
        write_run(folder, settings.load("tiny", keys=keys), {"command": "train"})
        with pytest.raises(gspo.InputError) as caught:
            new_folder(settings.load("tiny", [f"dir={folder}"]))
        assert f"`gspo.train({given.format(folder)}`" in str(caught.value)
