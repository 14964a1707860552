"""Rewards in whole runs: several at once, hanging ones, scripts and command lines, and nothing left running."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo import cli
from processes import all_gone, marked

SHORT: dict[str, Any] = dict(steps=2, prompts_per_step=4, group_size=8, threads=1, eval={"every": 0})


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def journal(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def test_a_run_goes_on_over_answers_that_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """P15: training goes on, what hangs is counted, and no process is left."""
    mark = uuid.uuid4().hex
    monkeypatch.setenv("MARK", mark)

    def judge(completion: str) -> float:
        import time

        if completion[:1] in tuple("13579"):
            time.sleep(3600)
        return digits(completion)

    folder = tmp_path / "run"
    judging = {"timeout": 0.2, "workers": 4, "max_failed": 0.9}
    result = gspo.train("tiny", dir=folder, reward=judge, judging=judging, **SHORT)
    assert result.step == 2
    lines = journal(folder)
    with gzip.open(folder / "rollouts" / "00000001.jsonl.gz", "rt") as file:
        rollouts = [json.loads(line) for line in file]
    hung = [r for r in rollouts if r["text"][:1] in [*"13579"]]
    assert 0 < len(hung) == lines[0]["rollouts/timeout"] < len(rollouts)
    assert lines[0]["reward/failed"] == lines[0]["reward/judge/failed"] == len(hung) / 32
    assert {r["reward_status"]["judge"] for r in hung} == {"timeout"}
    assert all(r["reward"] is None and "0.2 s" in r["reward_error"] for r in hung)
    assert all_gone(mark), marked(mark)


def test_several_rewards_are_added_and_each_is_journalled(tmp_path: Path) -> None:
    def longest(completions: list[str]) -> list[float]:
        return [float(len(c) == max(map(len, completions))) for c in completions]

    async def waits(completion: str) -> float:
        return 0.5

    rewards = [digits, {"function": "overlong:2", "weight": 0.5}, {"function": longest, "weight": 0}, waits]
    folder = gspo.train("tiny", dir=tmp_path / "run", reward=rewards, **SHORT).folder
    for line in journal(folder):
        mean = {name: line[f"reward/{name}/mean"] for name in ("digits", "overlong", "longest", "waits")}
        assert line["reward/mean"] == pytest.approx(mean["digits"] + 0.5 * mean["overlong"] + mean["waits"])
        assert -1 <= mean["overlong"] < 0 < mean["longest"] <= 1
    with pytest.raises(gspo.InputError, match=r"python:digits: .*given from Python"):
        gspo.train(resume=folder, steps=3)
    assert gspo.train(resume=folder, steps=3, reward=rewards).step == 3


def test_a_constant_reward_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gspo.train("tiny", dir=tmp_path / "run", reward=["format", "number"], **{**SHORT, "group_size": 16})
    assert capsys.readouterr().out.count("format gave 0 to each of the first 64 answers") == 1


def test_a_script_without_a_guard_and_with_a_lambda(tmp_path: Path) -> None:
    mark = uuid.uuid4().hex
    script = tmp_path / "script.py"
    script.write_text(
        "import gspo\n"
        "class Scale:\n    factor = 2.0\n"
        "def judge(completion):\n    return Scale.factor * len(completion)\n"
        "print('once')\n"
        f"run = gspo.train('tiny', dir={str(tmp_path / 'run')!r}, reward=[judge, lambda completion: 1.0], **{SHORT!r})\n"
        "print('steps', run.step)\n"
    )
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, "MARK": mark}, check=False
    )
    assert done.stdout.count("once") == 1, done.stdout + done.stderr
    assert "steps 2" in done.stdout
    assert all_gone(mark), marked(mark)


def test_the_command_line_judges_in_the_pool(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mark = tmp_path / "pids"
    judge = tmp_path / "judge.py"
    judge.write_text(
        "import os\n"
        f"def score(completion):\n    open({str(mark)!r}, 'a').write(f'{{os.getpid()}}\\n')\n    return float(len(completion))\n"
    )
    words = ["eval", "random-dense", "tiny", f"reward={judge}:score", "eval.limit=4", "threads=1", "eval.pass_at=0"]
    assert cli.guarded(lambda: cli.app(words)) == 0
    assert "pass@1: 1.000" in capsys.readouterr().out
    assert str(os.getpid()) not in mark.read_text().split()
    for reward, part in {"judge:http://127.0.0.1:9/v1": "refused", "[number, nubmer]": "'number'"}.items():
        words[3] = f"reward={reward}"
        assert cli.guarded(lambda: cli.app(words)) == 2
        assert part in capsys.readouterr().err
