"""Environments in real processes: whatever one does is data, and the others go on."""

from __future__ import annotations

import os
import random
import time
import uuid
from collections.abc import Generator
from contextlib import closing
from typing import Any

import numpy as np
import pytest
from voices import CHATML, END, tokenizer

from gspo.config import Data, Judging
from gspo.conversations.sources import Found, Stage, open_stage, seeds
from gspo.conversations.transcript import Voice
from gspo.engines.engine import Next, Over, Turn
from gspo.errors import InputError
from gspo.sections import Conversation
from gspo.tasks.data import Rows
from gspo.tasks.environment import Step
from gspo.types import Prompt, Stop
from processes import all_gone


class Counting:
    """Counts replies, and does what they say."""

    def reset(self, seed: int, word: str = "none") -> str:
        self.seed, self.replies = seed, 0
        if word == "bad":
            raise ValueError("no such beginning")
        return f"{seed} {word}"

    def step(self, reply: str) -> Any:
        self.replies += 1
        if reply == "sleep":
            time.sleep(3600)
        if reply == "exit":
            os._exit(3)
        if reply == "raise":
            raise KeyError("broken")
        if reply == "nothing":
            return Step(None)
        if reply == "end":
            return [], 1.0, True
        return f"{self.replies} of {os.getpid()}", 0.25, False


class Forgetful:
    """Begins otherwise each time."""

    def reset(self, seed: int) -> str:
        return str(random.SystemRandom().random())

    def step(self, reply: str) -> Step:
        return Step("again")


class Patient:
    """Both methods are async."""

    async def reset(self, seed: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "s"}, {"role": "user", "content": str(seed)}]

    async def step(self, reply: str) -> Step:
        return Step(None, float(len(reply)), True)


def guess(seed: int) -> Generator[str, str, float]:
    reply = yield f"guess {seed}"
    while reply != str(seed):
        reply = yield "wrong"
    return 1.0


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of every process that the test starts."""
    found = uuid.uuid4().hex
    monkeypatch.setenv("MARK", found)
    return found


def stage(environment: Any, workers: int = 2, **limits: Any) -> Stage:
    found = Found(environment.__name__, f"conversation.environment={environment.__name__}", environment)
    return open_stage(found, Conversation(environment=environment, **limits), Judging(workers=workers))


class Table:
    """Some conversations, played by hand."""

    def __init__(self, opened: Stage, count: int = 4) -> None:
        self.voice = Voice(tokenizer(CHATML), True)
        rows, scenes = opened.begin(seeds("here", "train", count), Data())
        self.rows = rows.rows
        self.talks = opened.talks(scenes, self.voice)

    def turn(self, said: dict[int, str], cut: bool = False) -> dict[Any, Next | Over]:
        for row, text in said.items():
            messages = self.rows[row]["prompt"]
            shown = self.voice.text(messages)
            prompt = Prompt(row, shown, np.array(self.voice.ids(shown)), self.rows[row], tuple(messages))
            ids = [*self.voice.ids(text), *([] if cut else self.voice.ids(END))]
            self.talks.take(Turn(row, prompt, np.array(ids), cut))
        found: dict[Any, Next | Over] = {}
        while len(found) < len(said):
            found |= {reply.key: reply for reply in self.talks.replies(wait=True)}
        return found

    def heard(self, reply: Next | Over) -> str:
        assert isinstance(reply, Next)
        return self.voice.written(reply.token_ids).split("user\n")[1].split(END)[0]


def over(reply: Next | Over) -> Over:
    assert isinstance(reply, Over)
    return reply


def test_each_conversation_has_an_environment_of_its_own_that_lives_on() -> None:
    opened = stage(Counting)
    with closing(opened.pool):
        table = Table(opened)
        first = {row: table.heard(r).split(" of ") for row, r in table.turn(dict.fromkeys(range(4), "go")).items()}
        second = {row: table.heard(r).split(" of ") for row, r in table.turn(dict.fromkeys(range(4), "go")).items()}
        assert {count for count, _ in first.values()} == {"1"}
        assert {count for count, _ in second.values()} == {"2"}
        assert {row: pid for row, (_, pid) in first.items()} == {row: pid for row, (_, pid) in second.items()}
        assert len({pid for _, pid in first.values()}) == 2, "both workers have some"
        ends = table.turn({0: "end", 1: "end"})
        assert [(over(r).stop, over(r).earned, over(r).text) for r in ends.values()] == [
            (Stop.ENVIRONMENT, 1.5, "end")
        ] * 2
        assert [m["role"] for m in over(ends[0]).messages] == ["assistant", "user", "assistant", "user", "assistant"]


def test_what_hangs_ends_or_raises_is_data_and_its_neighbours_are_played_again(mark: str) -> None:
    opened = stage(Counting, workers=1, timeout=1.0)
    with closing(opened.pool):
        table = Table(opened, 6)
        table.turn(dict.fromkeys(range(6), "go"))
        start = time.monotonic()
        ends = table.turn({0: "sleep", 1: "exit", 2: "raise", 3: "nothing", 4: "go"})
        assert time.monotonic() - start < 20
        assert [over(ends[row]).stop for row in range(4)] == [Stop.ERROR] * 4
        assert all(over(ends[row]).earned is None for row in range(4))
        errors = [str(over(ends[row]).error) for row in range(4)]
        assert "within 1 s (conversation.timeout)" in errors[0]
        assert "code 3" in errors[1]
        assert "KeyError: 'broken'" in errors[2]
        assert "step said nothing" in errors[3]
        assert table.heard(ends[4]).startswith("2 of"), (
            "its environment was killed with that which hung, and has counted again"
        )
        assert over(table.turn({5: "end"})[5]).earned == 1.25, "what was given before is not given twice"
    assert all_gone(mark)


def test_limits_cut_a_conversation() -> None:
    opened = stage(Counting, max_turns=2, max_tokens=400)
    with closing(opened.pool):
        table = Table(opened)
        table.turn({0: "go", 1: "go"})
        assert (over(table.turn({0: "go"})[0]).stop, len(table.talks._open)) == (Stop.LENGTH, 1)
        cut = over(table.turn({1: "gg"}, cut=True)[1])
        assert (cut.stop, cut.earned, cut.text) == (Stop.LENGTH, 0.25, "gg")
        full = over(table.turn({2: "g" * 380})[2])
        assert (full.stop, full.earned) == (Stop.LENGTH, 0.25)


def test_a_cut_conversation_that_was_given_nothing_has_earned_nothing() -> None:
    opened = stage(guess)
    with closing(opened.pool):
        table = Table(opened)
        assert over(table.turn({0: "?"}, cut=True)[0]).earned == 0.0


def test_generators_and_async_methods_are_environments() -> None:
    opened = stage(guess)
    with closing(opened.pool):
        table = Table(opened)
        assert table.rows[3]["prompt"] == [{"role": "user", "content": "guess 3"}]
        assert table.heard(table.turn({3: "2"})[3]) == "wrong"
        assert over(table.turn({3: "3"})[3]).earned == 1.0
    opened = stage(Patient)
    with closing(opened.pool):
        table = Table(opened)
        assert [m["role"] for m in table.rows[0]["prompt"]] == ["system", "user"]
        assert over(table.turn({0: "abc"})[0]).earned == 3.0


def test_rows_give_their_columns_to_reset_and_keep_them() -> None:
    from gspo.tasks.data import Rows

    rows = Rows("file", ({"word": "x", "n": 1}, {"word": "y", "n": 2}), ("word", "n"))
    opened = stage(Counting, workers=1)
    with closing(opened.pool):
        made, scenes = opened.begin(rows, Data())
        assert [row["prompt"][0]["content"] for row in made.rows] == ["0 x", "1 y"]
        assert (made.columns, made.rows[1]["n"]) == (("word", "n", "prompt"), 2)
        assert scenes[1].seed == 1


def test_a_beginning_that_fails_is_refused_with_its_row() -> None:
    from gspo.tasks.data import Rows

    rows = Rows("file", ({"word": "x"}, {"word": "bad"}), ("word",))
    opened = stage(Counting, workers=1)
    with closing(opened.pool), pytest.raises(InputError, match=r"row 1:[\s\S]*no such beginning"):
        opened.begin(rows, Data())


def test_an_environment_that_does_not_follow_from_its_seed_is_an_error() -> None:
    opened = stage(Forgetful, workers=1)
    with closing(opened.pool):
        ended = over(Table(opened).turn({0: "go"})[0])
        assert ended.stop is Stop.ERROR
        assert "does not follow from its seed" in str(ended.error)


@pytest.mark.parametrize("seed", ["abc", "7", None, 1.5, True])
def test_a_column_seed_is_taken_and_has_to_be_a_whole_number(seed: Any) -> None:
    def rows(*seeds: Any) -> Rows:
        return Rows("here", tuple({"prompt": "p", "seed": one} for one in seeds), ("prompt", "seed"))

    opened = stage(Counting, workers=1)
    with closing(opened.pool):
        made, scenes = opened.begin(rows(7, 7, 9), Data())
        assert [scene.seed for scene in scenes.values()] == [7, 7, 9]
        assert made.rows[2]["prompt"][0]["content"] == "9 none"
        with pytest.raises(InputError, match="here: row 1: the column seed is"):
            opened.begin(rows(7, seed), Data())


class Deaf:
    """Has no `step`."""

    def reset(self, seed: int) -> str:
        return "hello"


class Greedy:
    """Needs what no row has."""

    def reset(self, seed: int, banana: str, apple: int = 3) -> str:
        return banana

    def step(self, reply: str) -> Step:
        return Step("again")


def wants(s: int, banana: str) -> Generator[str, str, float]:
    yield banana
    return 1.0


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (Deaf, r"an environment has a method step\(reply\), and Deaf has none"),
        (Greedy, "takes the column 'banana', and there are prompt, word"),
        (wants, "takes the column 'banana', and there are prompt, word"),
    ],
)
def test_what_an_environment_lacks_is_named_at_the_start(environment: Any, said: str) -> None:
    opened = stage(environment, workers=1)
    with closing(opened.pool), pytest.raises(InputError, match=said):
        opened.begin(Rows("here", ({"prompt": "p", "word": "w"},), ("prompt", "word")), Data())
