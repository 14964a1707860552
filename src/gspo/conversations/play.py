"""Environments in a worker process: each conversation has one of its own there, until it is over.

In: a `Move`, the replies of a conversation so far. Out: what the environment says to the last one. `partner.py` sends
moves through a `rewards.runner.Pool`, which keeps a conversation in one worker. The standard library alone is imported
here.
"""

from __future__ import annotations

import contextlib
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from gspo.rewards.call import FromFile, verdict
from gspo.tasks.environment import Environment, Factory, Step, factory, messages, wanted
from gspo.tasks.tools import Tool, ToolUse

if TYPE_CHECKING:
    import asyncio  # which takes long to import, and few environments need it


@dataclass(frozen=True)
class Scene:
    """What a conversation begins from."""

    seed: int
    columns: Mapping[str, Any]
    opening: tuple[Mapping[str, str], ...] | None = None
    """What `reset` says, so far as it is known."""


@dataclass(frozen=True)
class Move:
    """What one call of a worker is about."""

    scene: Scene
    session: int | None = None
    """Number of the conversation: its moves go to one worker. None: only how it begins is asked for."""
    replies: tuple[str, ...] = ()
    over: bool = False
    """The conversation has ended without the environment: it is closed."""

    completions: tuple[str, ...] = ("",)
    """A move has the time of one answer."""


Said = tuple[list[dict[str, str]], float | None, bool]
"""Messages, reward, done."""


@dataclass
class _Live:
    environment: Environment
    replies: tuple[str, ...] = ()


@dataclass
class Play:
    """What a worker does with a move. It has the shape of `rewards.call.Call`, so that the same pool runs it."""

    function: Callable[..., Any] | FromFile
    """What makes environments, as the user named it."""
    prepare: Callable[[], None] | None = None
    """Called once in each process: what it takes is no conversation's time."""
    asynchronous: bool = False
    _live: dict[int, _Live] = field(default_factory=dict)
    _loop: asyncio.Runner | None = None

    def __call__(self, move: Move) -> Said:
        """Raises what the environment raises, and TypeError or ValueError for what is no step."""
        live = None if move.session is None else self._live.pop(move.session, None)
        if move.over:
            if live is not None:
                self._close(live)
            return [], None, True
        if live is None:
            assert not isinstance(self.function, FromFile)
            make: Factory = factory(self.function)
            live = _Live(_whole(make()))
        said: Said = [], None, True
        try:
            said = self._play(live, move)
        finally:
            if said[2] or move.session is None:
                self._close(live)
        if not said[2] and move.session is not None:
            self._live[move.session] = live
        return said

    def _play(self, live: _Live, move: Move) -> Said:
        """The move, after those before it if the environment has not had them: then it was made anew."""
        said = ([], None, False) if live.replies else self._begin(live.environment, move.scene)
        for reply in move.replies[len(live.replies) :]:
            if said[2]:
                raise RuntimeError(
                    "played again in a new process, it ended earlier than before: it does not follow from its seed"
                )
            said = _step(self._awaited(live.environment.step(reply)))
            live.replies = (*live.replies, reply)
        return said

    def _begin(self, environment: Environment, scene: Scene) -> Said:
        begin = self.function if inspect.isgeneratorfunction(self.function) else environment.reset
        opening = messages(self._awaited(environment.reset(scene.seed, **wanted(begin, scene.columns))))
        if scene.opening is not None and opening != [dict(m) for m in scene.opening]:
            raise RuntimeError(
                f"reset(seed={scene.seed}) said something else than when the prompts were made, so it does not follow from its seed: "
                f"{opening!r:.300}"
            )
        return opening, None, False

    def _awaited(self, value: Any) -> Any:
        if not inspect.isawaitable(value):
            return value

        async def wait() -> Any:
            return await value

        import asyncio

        self._loop = self._loop or asyncio.Runner()
        return self._loop.run(wait())

    def _close(self, live: _Live) -> None:
        close = getattr(live.environment, "close", None)
        if callable(close):
            with contextlib.suppress(Exception):  # it is over, whatever it says to that
                self._awaited(close())


def _whole(environment: Any) -> Environment:
    """Raises TypeError for an environment that lacks a method: at the start, and not at the first reply."""
    for method in ("reset(seed)", "step(reply)"):
        if not callable(getattr(environment, method.partition("(")[0], None)):
            raise TypeError(f"an environment has a method {method}, and {type(environment).__name__} has none")
    found: Environment = environment
    return found


def _step(found: Any) -> Said:
    if not isinstance(found, tuple) or len(found) not in (1, 2, 3):
        raise TypeError(f"step gives (messages, reward, done), and this one gave {found!r:.200}")
    step = Step(*found)
    done = bool(step.done)
    said = [] if done else messages(step.messages)
    if not done and not said:
        raise ValueError("step said nothing, and not that the conversation is over")
    if any(message["role"] == "assistant" for message in said):
        raise TypeError("an environment said a message of the assistant, which the model is to write")
    return said, verdict(step.reward), done


@dataclass
class ToolsFrom:
    """Makes `ToolUse` environments of tools that are loaded once in each worker."""

    tools: Mapping[str, Tool | FromFile]
    role: str
    _loaded: dict[str, Tool] | None = None

    def __call__(self) -> ToolUse:
        if self._loaded is None:
            # Also for what they import while they run.
            sys.path[:0] = [str(tool.path.parent) for tool in self.tools.values() if isinstance(tool, FromFile)]
            self._loaded = {k: t.load() if isinstance(t, FromFile) else t for k, t in self.tools.items()}
        return ToolUse(self._loaded, self.role)
