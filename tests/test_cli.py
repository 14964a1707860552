"""The command line: bad input ends with 2 and one clear message before a model is loaded."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import gspo
from gspo import cli


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    """Exit code, output and errors of a command."""
    code = cli.guarded(lambda: cli.app(list(words)))
    out, err = capsys.readouterr()
    return code, out, err


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    lines = [{"prompt": f"say {i}", "answer": str(i)} for i in range(9)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def write(folder: Path, name: str, text: str) -> str:
    (folder / name).write_text(text)
    return str(folder / name)


BAD_WORDS = [
    (["optimizer.learning_rte=1e-5"], ["optimizer.learning_rte", "did you mean 'optimizer.learning_rate'"]),
    (["learning_rate=1e-5"], ["did you mean 'optimizer.learning_rate'"]),
    (["steps=many"], ["steps", "'many'"]),
    (["group_size=1"], ["group_size=1", "nothing to be compared with"]),
    (["algorithm=gsop"], ["did you mean 'gspo'"]),
    (["algorithm.aggregation=token_mean"], ["gspo is defined by aggregation=sequence_mean", "2507.18071"]),
    (["steps"], ["'steps'", "key=value"]),
    (["data=no/such.jsonl"], ["no/such.jsonl"]),
    (["reward=nonsense"], ["nonsense"]),
    (["reward=judge.py:f"], ["judge.py"]),
    (["model=./no/such/folder"], ["./no/such/folder"]),
    (["data=addition:9-1"], ["addition:9-1", "larger"]),
    (["data=sort:many"], ["sort:many", "sort:N"]),
    (["data=srot:8"], ["srot:8", "did you mean 'sort:8'"]),
    (["data.max_prompt_tokens=8"], ["max_prompt_tokens", "row 0"]),
    (["model.device=cuda:9"], ["model.device=cuda:9"]),
]


@pytest.mark.parametrize(("words", "parts"), BAD_WORDS, ids=lambda v: v[0] if isinstance(v, list) else None)
def test_a_bad_word_is_refused_with_what_to_do(
    words: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, "train", "tiny", f"dir={tmp_path / 'run'}", *words)
    assert code == 2, out + err
    assert all(part in err for part in parts), err
    assert err.count("\n") == 1, "one message"
    assert "policy" not in out, "before a model is loaded"
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_data_is_checked_on_its_rows(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = rows.read_text().splitlines()
    null = write(tmp_path, "null.jsonl", "\n".join([*lines[:7], '{"prompt": "x", "answer": null}', *lines[8:]]))
    empty = write(tmp_path, "empty.jsonl", "")
    other = write(tmp_path, "other.jsonl", '{"question": "x", "answer": "1"}\n')
    for path, parts in ((null, ["row 7", "answer"]), (empty, ["empty.jsonl"]), (other, ["'prompt'", "question"])):
        code, out, err = run(capsys, "train", "tiny", f"dir={tmp_path / 'run'}", f"data={path}", "reward=number")
        assert code == 2
        assert all(part in err for part in parts), err
        assert "policy" not in out


@pytest.mark.parametrize(
    ("code", "parts"),
    [
        ("def other(completion): return 1.0", ["score", "other"]),
        ("def score(completion, gold): return 1.0", ["gold", "answer"]),
        ("def score(completion, answer): return 'yes'", ["yes"]),
        ("def score(completion, answer): return 1 / 0", ["ZeroDivisionError"]),
        ("def score(completion, answer)", ["judge.py"]),
    ],
)
def test_a_reward_function_is_checked_on_the_rows(
    code: str, parts: list[str], rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge = write(tmp_path, "judge.py", code)
    exit_code, out, err = run(
        capsys, "train", "tiny", f"dir={tmp_path / 'run'}", f"data={rows}", f"reward={judge}:score"
    )
    assert exit_code == 2
    assert all(part in err for part in parts), err
    assert "policy" not in out


def test_training_on_ones_own_data_and_reward(rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = write(tmp_path, "judge.py", "def score(completion, answer):\n    return float(answer in completion)\n")
    words = [f"dir={tmp_path / 'run'}", f"data={rows}", f"reward={judge}:score", "steps=2", "threads=1"]
    code, out, err = run(capsys, "train", "tiny", *words)
    assert code == 0, err
    assert "step 2/2" in out
    assert (tmp_path / "run" / "checkpoints" / "00000002" / "model.safetensors").exists()

    code, out, err = run(capsys, "train", "--resume", str(tmp_path / "run"), "steps=3")
    assert code == 0, err
    assert "step 3/3" in out

    code, out, err = run(capsys, "eval", str(tmp_path / "run" / "checkpoints" / "00000003"), "tiny", "eval.samples=3")
    assert code == 0, err
    assert "avg@3" in out
    assert "pass@3" in out


def test_a_task_of_reasoning_gym_is_trained_on_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("reasoning_gym")
    words = ["model=random-dense", "model.dtype=float32", "steps=2", "sampling.max_new_tokens=4", "judging.workers=1",
             "threads=1", "data.limit=40", "eval.limit=8", f"dir={tmp_path / 'run'}"]  # fmt: skip
    code, _, err = run(capsys, "train", "reasoning-gym:chain_sum,max_terms=2,max_digits=1", *words)
    assert code == 0, err
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    assert all(line["reward/reasoning-gym/failed"] == 0 and line["reward/mean"] >= 0 for line in lines)
    assert lines[-1]["eval/rows"] == 8
    code, _, err = run(capsys, "train", "reasoning-gym:chain_smu", *words[:-1], f"dir={tmp_path / 'other'}")
    assert code == 2
    assert "did you mean reasoning-gym:chain_sum" in err
    assert not (tmp_path / "other").exists()


def test_tasks_are_listed_and_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "tasks")
    assert code == 0
    assert "addition:LOW-HIGH" in out
    code, out, _ = run(capsys, "tasks", "addition:1-9", "--rows", "2")
    assert (code, out.count("prompt: What is"), out.count("answer: ")) == (0, 2, 2)
    code, _, err = run(capsys, "tasks", "additoin:1-9")
    assert code == 2
    assert "did you mean 'addition:1-9'" in err


def test_the_demo_ends_with_its_accuracy(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "train", "tiny", f"dir={tmp_path / 'run'}", "steps=1", "threads=1")
    assert code == 0, err
    last = out.splitlines()[-1]
    assert last.startswith("held-out accuracy: ")
    assert " -> " in last


def test_a_reward_that_is_no_share_is_called_a_reward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["reward=overlong:2", "sampling.max_new_tokens=6", "eval.limit=4", "threads=1", "steps=1"]
    code, out, err = run(capsys, "train", "tiny", f"dir={tmp_path / 'run'}", *words)
    assert code == 0, err
    assert out.splitlines()[-1].startswith("held-out reward: -0.")
    assert re.search(r"before training: held-out -0\.\d+ \(-\d\.\d\d to -\d\.\d\d\)", out)


def test_a_run_that_cannot_go_on_ends_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"dir={tmp_path / 'run'}", "optimizer.learning_rate=1e30", "optimizer.max_grad_norm=null", "threads=1"]
    code, _, err = run(capsys, "train", "tiny", *words)
    assert code == 1
    assert "not finite" in err


def test_help_lists_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "train", "--help")
    assert code == 0
    for key in ("optimizer.learning_rate", "algorithm.clip_low", "eval.samples"):
        assert key in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["eval", "random-dense", "tiny", "guard=off"], "'guard=off' has no effect"),
        (["eval", "random-dense", "tiny", "eval.patience=3"], "'eval.patience=3' has no effect"),
        (["eval", "random-dense", "tiny", "data.difficulty=[0,1]"], "has no effect on `gspo eval`"),
        (["eval", "random-dense", "tiny", "model=tiny-dense"], "'model=tiny-dense': `gspo eval MODEL RECIPE`"),
        (["eval", "random-dense", "tiny", "model.lora=4"], "'model.lora=4': `gspo eval MODEL RECIPE`"),
        (["show", "runs/x", "--report", "--step", "1"], "--report shows the whole run"),
        (["lab", "dir="], "dir= names no folder"),
        (["lab", "moe", "dir=a", "dir=b"], "dir= is given 2 times"),
        (["lab", "--all", "moe"], "moe is named beside it"),
    ],
)
def test_what_a_command_does_not_read_is_refused(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(capsys, *words)
    assert code == 2
    assert said in err


def test_a_resumed_run_has_no_recipe(tmp_path: Path) -> None:
    with pytest.raises(gspo.InputError, match="leave the recipe out"):
        gspo.train("demo", resume=tmp_path)
