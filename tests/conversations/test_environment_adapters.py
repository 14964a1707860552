"""Environments of others: OpenEnv's protocol against a real server on a real socket, TextArena against its package."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gspo
from gspo.errors import InputError
from gspo.tasks.environment import Step
from gspo.tasks.openenv import OpenEnv
from gspo.tasks.textarena import TextArena

websockets = pytest.importorskip("websockets.sync.server")


class Server:
    """Echoes, as OpenEnv's echo environment does; it has one session, and the third step is the last. "die" hangs up."""

    def __init__(self) -> None:
        self.said: list[dict[str, Any]] = []
        self.open = 0
        self.refused = 0
        self.server = websockets.serve(self.talk, "127.0.0.1", 0)
        self.url = f"ws://127.0.0.1:{self.server.socket.getsockname()[1]}"

    def talk(self, socket: Any) -> None:
        self.open += 1
        mine, steps = self.open, 0
        if mine > 1:  # as OpenEnv's own server does it: before anything was asked
            self.refused += 1
            self.open -= 1
            socket.send(json.dumps({"type": "error", "data": {"message": "full", "code": "CAPACITY_REACHED"}}))
            return
        for raw in socket:
            message = json.loads(raw)
            self.said.append({"session": mine, "path": socket.request.path, **message})
            kind, data = message["type"], message.get("data", {})
            if kind == "close":
                self.open -= 1
                return
            if data.get("message") == "die":
                self.open -= 1
                return
            if data.get("message") == "break":
                socket.send(json.dumps({"type": "error", "data": {"message": "no such action", "code": "INVALID"}}))
                continue
            steps += kind == "step"
            text = f"seed {data['seed']}" if kind == "reset" else data["message"].upper()
            found = {
                "observation": {"echoed_message": text, "steps": steps},
                "reward": None if kind == "reset" else 0.5,
            }
            socket.send(json.dumps({"type": "observation", "data": {**found, "done": steps == 3}}))


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    thread = threading.Thread(target=found.server.serve_forever)
    thread.start()
    yield found
    found.server.shutdown()
    thread.join()


def test_a_session_of_openenv_from_reset_to_close(server: Server) -> None:
    env = OpenEnv(server.url)
    assert env.reset(7) == "seed 7"
    assert env.step("hi") == Step("HI", 0.5, False)
    assert env.step('{"message": "as json"}') == Step("AS JSON", 0.5, False)
    assert env.step("end") == Step(None, 0.5, True)
    env.close()
    assert [(m["type"], m.get("data")) for m in server.said[:4]] == [
        ("reset", {"seed": 7}),
        ("step", {"message": "hi"}),
        ("step", {"message": "as json"}),
        ("step", {"message": "end"}),
    ]
    assert server.said[0]["path"] == "/ws"


def test_a_server_that_is_full_is_asked_again_and_a_refusal_is_told(server: Server) -> None:
    first, second = OpenEnv(server.url), OpenEnv(server.url.replace("ws", "http", 1))
    first.reset(1)
    timer = threading.Timer(0.3, first.close)
    timer.start()
    assert second.reset(2) == "seed 2"
    assert server.refused >= 1
    with pytest.raises(RuntimeError, match="refused step: no such action"):
        second.step("break")
    with pytest.raises(ConnectionError, match="closed the connection before it answered step"):
        second.step("die")
    second.close()
    timer.join()


def test_a_server_that_is_down_is_said_at_once(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(InputError, match=r"openenv:ws://127.0.0.1:9: the beginning failed(.|\n)*Connection refused"):
        gspo.train("tiny", data="openenv:ws://127.0.0.1:9", reward=["environment"], dir=tmp_path / "run")
    assert time.monotonic() - start < 20
    assert not (tmp_path / "run").exists()


def test_other_forms_are_said_by_a_class(server: Server) -> None:
    class Mine(OpenEnv):
        url = server.url

        def render(self, observation: dict[str, Any]) -> str:
            return f"{observation['steps']}: {observation['echoed_message']}"

        def parse(self, reply: str) -> dict[str, Any]:
            return {"message": reply.split()[-1]}

    env = Mine()
    assert env.reset(0) == "0: seed 0"
    assert env.step("I say hello").messages == "1: HELLO"
    env.close()


def test_a_game_of_textarena_follows_from_its_seed_whatever_is_played_beside_it() -> None:
    pytest.importorskip("textarena")

    def play(seed: int, beside: bool) -> tuple[list[Any], float | None]:
        env, other = TextArena("GuessTheNumber-v0"), TextArena("GuessTheNumber-v0")
        said: list[Any] = [env.reset(seed)]
        if beside:
            other.reset(seed + 1)
        for number in range(1, 21):
            step = env.step(f"[{number}]")
            random.random()
            if beside:
                other.step("[3]")
            if step.done:
                return said, step.reward
            said.append(step.messages)
        raise AssertionError

    said, reward = play(3, beside=False)
    assert "guess the number between 1 and 20" in said[0]
    assert "[1]" not in said[1], "what the player said is not told again"
    assert "higher" in said[1]
    assert reward is not None
    assert play(3, beside=True) == (said, reward)


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from voices import tokenizer

    from gspo.conversations import sources
    from gspo.settings import load

    monkeypatch.setitem(sources.ADAPTERS, "textarena", (TextArena, "no_such_package"))
    with pytest.raises(InputError, match=r"data=textarena:X: needs the package no_such_package.*gspo\[textarena\]"):
        sources.find(load(None, ["data=textarena:X"]), tokenizer(None))
