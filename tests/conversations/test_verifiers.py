"""Tasksets of verifiers, against its package: where that is not installed, they are skipped (docs/conversations.md says how it was run)."""

from __future__ import annotations

import asyncio
import gzip
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo.errors import InputError
from gspo.tasks.environment import Step

vf = pytest.importorskip("verifiers.v1")

from gspo.tasks.verifiers import Verifiers, _source  # noqa: E402

ASKED = """
import verifiers.v1 as vf


class Letter(vf.TaskData):
    letter: str


class Asked(vf.Task[Letter]):
    async def setup(self, trace, runtime):
        trace.info["set_up"] = True

    async def finalize(self, trace, runtime):
        done = await runtime.run(["echo", "finished"], {})
        trace.info["finished"] = done.stdout.strip()

    @vf.reward(weight=2.0)
    async def begins(self, trace):
        assert trace.info == {"set_up": True, "finished": "finished"}
        return float(trace.last_reply.startswith(self.data.letter))

    @vf.reward(weight=-0.5)
    async def long(self, trace):
        return len(trace.last_reply) > 3

    @vf.metric
    async def words(self, trace):
        return len(trace.last_reply.split())


class Config(vf.TasksetConfig):
    letters: str = "abcdefghijklmnopqrstuvwxyz"


class Letters(vf.Taskset[Asked, Config]):
    def load(self):
        for letter in self.config.letters:
            yield Asked(Letter(prompt=f"Begin with {letter}.", system_prompt="Be brief.", letter=letter), self.config.task)


__all__ = ["Letters"]
"""
PLAYED = """
import itertools

import verifiers.v1 as vf


class Number(vf.TaskData):
    number: int


class Guess(vf.Task[Number]):
    @vf.stop
    async def gave_up(self, trace: vf.Trace) -> bool:
        return trace.last_reply == "stop"


class Seats(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class Game(vf.Env[Seats]):
    async def run(self, task, agents):
        tries = 0
        async with agents.player.interaction(task) as talk:
            segment = await talk.turn("Which number?")
            while not segment.terminated:
                tries += 1
                if segment.last_reply == "break":
                    raise KeyError("broken")
                if segment.last_reply == str(task.data.number):
                    break
                segment = await talk.turn([{"role": "user", "content": f"No, not {segment.last_reply}."}])
        talk.trace.record_reward("tries", 0.0 if segment.terminated else 1 / tries)

    async def finalize(self, task, episode):
        (trace,) = episode.traces
        trace.record_reward("told", 0.25, 2.0)


class Numbers(vf.Taskset[Guess, vf.TasksetConfig]):
    INFINITE = True

    def load(self):
        for i in itertools.count():
            yield Guess(Number(number=i), self.config.task)


__all__ = ["Numbers", "Game"]
"""
UNUSABLE = {
    "tool servers": (
        "class Odd(vf.Task[vf.TaskData]):\n    @classmethod\n    def toolsets(cls, config):\n        return ['one']\n",
        "it has tool servers",
    ),
    "container": ("class Odd(vf.Task[vf.TaskData]):\n    NEEDS_CONTAINER = True\n", "its tasks need a container"),
    "rewrites": (
        "class Odd(vf.Task[vf.TaskData]):\n    @vf.intercept\n    async def other(self, request: vf.Request):\n        return request\n",
        "it rewrites what is said",
    ),
}
REST = """

class Oddities(vf.Taskset[Odd, vf.TasksetConfig]):
    def load(self):
        yield Odd(vf.TaskData(prompt="?"), self.config.task)


__all__ = ["Oddities"]
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "asked_letters.py").write_text(ASKED)
    (tmp_path / "played_numbers.py").write_text(PLAYED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    _source.cache_clear()
    for name in ("asked_letters", "played_numbers", "odd_one"):
        sys.modules.pop(name, None)
    return tmp_path


def played(words: str, seed: int, *replies: str) -> list[Any]:
    """What a conversation comes to, in one event loop after another, as workers play it."""
    env = Verifiers(words)
    with asyncio.Runner() as loop:
        said: list[Any] = [loop.run(env.reset(seed))]
        said += [loop.run(env.step(reply)) for reply in replies]
        loop.run(env.close())
    return said


def test_a_task_is_asked_and_judged_by_its_weighted_rewards() -> None:
    begun, end = played("asked-letters", 2, "cat")
    assert begun == [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Begin with c."}]
    assert end == Step(None, 2.0, True)
    assert played("asked-letters", 2, "catch")[-1] == Step(None, 1.5, True)
    assert played("asked-letters", 0, "cat")[-1] == Step(None, 0.0, True)
    assert played("asked-letters,letters=xyz", 1, "yes")[-1] == Step(None, 2.0, True)


def test_an_environment_plays_the_other_side() -> None:
    begun, no, end = played("played-numbers", 7, "5", "7")
    assert begun == [{"role": "user", "content": "Which number?"}]
    assert no == Step([{"role": "user", "content": "No, not 5."}])
    assert end == Step(None, 0.5 + 0.5, True)
    assert played("played-numbers", 7, "stop")[-1] == Step(None, 0.5, True), "the task's own stop"
    with pytest.raises(KeyError, match="broken"):
        played("played-numbers", 7, "break")


def test_no_task_is_on_both_sides() -> None:
    train, held_out = (Verifiers.seeds("asked-letters", side, 100) for side in ("train", "held_out"))
    assert sorted((*train, *held_out)) == list(range(26))
    assert len(train) > len(held_out) > 0
    assert Verifiers.seeds("played-numbers", "train", 5) == Verifiers.seeds("played-numbers", "train", 9)[:5]


def test_a_run_on_a_taskset(folder: Path) -> None:
    run = gspo.train(
        model={"name": "random-dense", "dtype": "float32"}, algorithm="gspo", data="verifiers:asked-letters", reward=["environment"],
        prompts_per_step=4, group_size=4, threads=1, steps=1, sampling={"max_new_tokens": 4}, eval={"limit": 4, "every": 1},
        conversation={"max_turns": 1, "timeout": 60}, judging={"workers": 1}, dir="runs/letters",
    )  # fmt: skip
    with gzip.open(run.folder / "rollouts" / "00000001.jsonl.gz", "rt") as file:
        answers = [json.loads(line) for line in file]
    ended = [a for a in answers if a["stop"] == "environment"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    for a in ended:
        said = a["text"].strip()
        wanted = letters[a["columns"]["seed"]]
        assert a["reward"] == 2.0 * said.startswith(wanted) - 0.5 * (len(said) > 3)
    assert {a["stop"] for a in answers} <= {"environment", "length"}
    assert run.last_reward is not None


@pytest.mark.parametrize("what", UNUSABLE)
def test_what_cannot_be_played_is_refused_by_name(folder: Path, what: str) -> None:
    source, said = UNUSABLE[what]
    (folder / "odd_one.py").write_text("import verifiers.v1 as vf\n\n\n" + source + REST)
    with pytest.raises(InputError, match=f"verifiers:odd-one: {said}"):
        gspo.train(data="verifiers:odd-one", reward=["environment"], dir="runs/none")
    assert not (folder / "runs").exists()


def test_an_unknown_taskset_or_setting_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="'no-such-thing' not found"):
        Verifiers.seeds("no-such-thing", "train", 1)
    with pytest.raises(InputError, match="lettres"):
        Verifiers.seeds("asked-letters,lettres=abc", "train", 1)
