"""A server made with OpenEnv's own package, as a process: where that is not installed, it is skipped (docs/conversations.md says how it was run)."""

from __future__ import annotations

import gzip
import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import gspo
from gspo.tasks.environment import Step
from gspo.tasks.openenv import OpenEnv

pytest.importorskip("openenv")

SERVER = """
import random

from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app


class Say(Action):
    message: str


class Heard(Observation):
    text: str


class Guess(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **more):
        self.digit, self.steps = random.Random(seed).randint(0, 9), 0
        return Heard(text="Which digit?")

    def step(self, action, timeout_s=None, **more):
        self.steps += 1
        right = action.message.strip() == str(self.digit)
        return Heard(text="no", reward=float(right), done=right or self.steps == 2)

    @property
    def state(self):
        return State(step_count=self.steps)


app = create_fastapi_app(Guess, Say, Heard, max_concurrent_envs=2)
"""


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("server")
    (folder / "guess_server.py").write_text(SERVER)
    command = [sys.executable, "-m", "uvicorn", "guess_server:app", "--host", "127.0.0.1", "--port", "0"]
    server = subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True)
    assert server.stderr is not None
    said = ""
    for line in server.stderr:
        said += line
        if found := re.search(r"running on http://(127.0.0.1:\d+)", line):
            break
    else:
        raise AssertionError(said)
    yield f"ws://{found[1]}"
    server.terminate()
    server.communicate(timeout=10)


def digit(seed: int) -> str:
    return str(random.Random(seed).randint(0, 9))


def test_a_session_with_its_server(url: str) -> None:
    env = OpenEnv(url)
    assert env.reset(3) == "Which digit?"
    assert env.step("x") == Step("no", 0.0, False)
    assert env.step(json.dumps({"message": digit(3)})) == Step(None, 1.0, True)
    env.close()
    env = OpenEnv(url)
    env.reset(0)
    with pytest.raises(RuntimeError, match="refused step"):
        env.step('{"massage": "x"}')
    env.close()


def test_sessions_beyond_its_capacity_wait_their_turn(url: str) -> None:
    first, second, third = (OpenEnv(url) for _ in range(3))
    first.reset(1)
    second.reset(2)
    with pytest.raises(ConnectionError, match="refused reset"):
        third.reset(3)
    first.close()
    assert third.reset(3) == "Which digit?"
    second.close()
    third.close()


def test_a_run_against_it(url: str, tmp_path: Path) -> None:
    run = gspo.train(
        model={"name": "random-dense", "dtype": "float32"}, algorithm="gspo", data=f"openenv:{url}", reward=["environment"],
        prompts_per_step=4, group_size=2, threads=1, steps=1, sampling={"max_new_tokens": 24, "max_rows": 2}, eval={"every": 0},
        conversation={"max_turns": 2}, judging={"workers": 1, "max_failed": 0.0}, dir=tmp_path / "run",
    )  # fmt: skip
    with gzip.open(run.folder / "rollouts" / "00000001.jsonl.gz", "rt") as file:
        answers = [json.loads(line) for line in file]
    assert len(answers) == 8
    for a in answers:
        said = [m["content"].strip() for m in a["messages"] if m["role"] == "assistant"]
        assert a["earned"] == float(digit(a["columns"]["seed"]) in said) or a["stop"] == "length"
    assert any(len(a["messages"]) == 3 for a in answers)
