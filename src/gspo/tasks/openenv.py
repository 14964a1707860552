"""Environments behind a server that speaks OpenEnv's protocol: one WebSocket for each conversation.

In: the address of a server. Out: an `Environment`. `data=openenv:ws://localhost:8000` uses it as it is; for observations
and actions of another form, write a class of your own that says what they are:

    class Echo(OpenEnv):
        url = "ws://localhost:8000"
        def render(self, observation): return observation["echoed_message"]
        def parse(self, reply): return {"message": reply}

The messages are those of OpenEnv 0.10 (`{"type": "reset" | "step" | "close", "data": ...}`, answered by `observation` or
`error`); its package is not needed, only `websockets` (`pip install 'gspo[openenv]'`).
"""

from __future__ import annotations

import json
import time
from contextlib import ExitStack, suppress
from typing import Any

from gspo.tasks.environment import Said, Step

_TRIES = 5
"""A server that has no session free is asked again, after 1, 2, 4, ... tenths of a second."""


class _FullError(ConnectionError):
    """The server has no session free."""


class OpenEnv:
    """A session of a server."""

    url = ""

    def __init__(self, url: str = "") -> None:
        self._url = (url or self.url).rstrip("/").replace("http", "ws", 1)
        self._url += "" if self._url.endswith("/ws") else "/ws"
        self._open = ExitStack()
        self._socket: Any = None

    def reset(self, seed: int) -> Said:
        for wait in range(_TRIES):
            try:
                self._socket = self._open.enter_context(self._connected())
                found = self._ask("reset", {"seed": seed})
                return self.render(found.get("observation") or {})
            except _FullError:
                self.close()
                if wait == _TRIES - 1:
                    raise
                time.sleep(0.1 * 2**wait)
        raise AssertionError

    def step(self, reply: str) -> Step:
        found = self._ask("step", self.parse(reply))
        done, reward = bool(found.get("done")), found.get("reward")
        said = None if done else self.render(found.get("observation") or {})
        return Step(said, None if reward is None else float(reward), done)

    def render(self, observation: dict[str, Any]) -> Said:
        """What the model is shown of an observation: the one text in it, or all of it as JSON."""
        texts = [value for value in observation.values() if isinstance(value, str) and value.strip()]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    def parse(self, reply: str) -> dict[str, Any]:
        """The action that a reply stands for: the JSON object that it is, or a message."""
        with suppress(ValueError):
            found = json.loads(reply)
            if isinstance(found, dict):
                return found
        return {"message": reply}

    def close(self) -> None:
        socket, self._socket = self._socket, None
        if socket is not None:
            with suppress(Exception):  # the server may have closed first
                socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _connected(self) -> Any:
        from websockets.sync.client import connect

        return connect(self._url, max_size=None)

    def _ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        from websockets.exceptions import ConnectionClosed

        try:
            with suppress(ConnectionClosed):  # a server that is full says so to whoever comes, and hangs up
                self._socket.send(json.dumps({"type": kind, "data": data}))
            found = json.loads(self._socket.recv())
        except ConnectionClosed as error:
            raise ConnectionError(f"{self._url} closed the connection before it answered {kind}: {error}") from error
        data = found.get("data") or {}
        if found.get("type") == "error":
            kind_of = _FullError if data.get("code") == "CAPACITY_REACHED" else RuntimeError
            raise kind_of(f"{self._url} refused {kind}: {data.get('message', data)}")
        return data
