"""A reward function with what it is given, so light that a worker process can import it in no time.

In: an `Item`, which is an answer or a whole group of answers. Out: its rewards as finite numbers, None where there is no
verdict. `load.py` makes `Call`s, `worker.py` and `score.py` call them. The standard library alone is imported here.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

LARGEST = 1e30
"""Rewards are squared and summed; beyond this float64 would overflow, and no scale of rewards needs it."""


class Work(Protocol):
    """What one call of a worker is about, as far as the pool cares."""

    @property
    def completions(self) -> tuple[str, ...]:
        """Answers: it has the time of so many."""

    @property
    def session(self) -> int | None:
        """What belongs together: it is done in order by one worker, where what it began is kept."""


@dataclass(frozen=True)
class Item:
    """What one call of a reward function is about."""

    completions: tuple[str, ...]
    """One answer; or, for a function over a group, all answers to a prompt."""
    tokens: tuple[int, ...]
    """Tokens that the policy sampled for each."""
    columns: Mapping[str, Any]
    """The row of the data."""
    rendered_prompt: str
    """The prompt as the model saw it."""
    conversations: tuple[tuple[Mapping[str, str], ...], ...] = ()
    """All messages of each, from the prompt on."""
    earned: tuple[float | None, ...] = ()
    """What the environment gave for each."""
    session: None = None
    """Answers are judged by whichever worker is free."""


@dataclass(frozen=True)
class FromFile:
    """A function of a Python file, kept as the file's bytes: every process runs what was there at the start."""

    path: Path
    name: str
    source: bytes
    asynchronous: bool = False
    """Whether calling the function gives something to wait for."""

    def load(self) -> Any:
        """The function. Raises whatever running the file raises, and AttributeError if it has no such name."""
        return getattr(self.module(), self.name)

    def module(self) -> ModuleType:
        """The file, run as a module of its own beside its neighbours."""
        spec = importlib.util.spec_from_file_location(f"gspo_reward_{self.path.stem}", self.path)
        assert spec is not None, self.path
        module = importlib.util.module_from_spec(spec)
        sys.modules[module.__name__] = module
        with importable(self.path.parent):
            # Compiled from the bytes: Python's bytecode cache goes by whole seconds.
            exec(compile(self.source, str(self.path), "exec"), vars(module))
        return module


@contextmanager
def importable(folder: Path) -> Iterator[None]:
    """Modules of `folder` can be imported inside."""
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


@dataclass(frozen=True)
class Call:
    """A function and where each of its parameters comes from."""

    function: Callable[..., Any] | FromFile
    """Of a file, a worker loads it: it is not called where it is a `FromFile`."""
    reads: Mapping[str, str] = field(default_factory=dict)
    """Column of each parameter."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Parameters that are the same at every call."""
    special: frozenset[str] = frozenset()
    """Of `own.SPECIAL`, those that it takes."""
    optional: frozenset[str] = frozenset()
    """Parameters that keep their default where the column is null."""
    prepare: Callable[[], None] | None = None
    """Called once in each process before the first answer: what it takes is not that answer's time."""
    group: bool = False
    """It takes all answers to a prompt, and gives back a number for each."""

    @property
    def asynchronous(self) -> bool:
        return self.function.asynchronous if isinstance(self.function, FromFile) else is_async(self.function)

    def __call__(self, item: Item) -> tuple[float | None, ...]:
        """Raises what the function raises, and TypeError or ValueError for what is no number."""
        assert not isinstance(self.function, FromFile)
        return self._verdicts(item, self.function(self._first(item), **self._given(item), **self.fixed))

    async def awaited(self, item: Item) -> tuple[float | None, ...]:
        """The same for an async function."""
        assert not isinstance(self.function, FromFile)
        found: Awaitable[Any] = self.function(self._first(item), **self._given(item), **self.fixed)
        return self._verdicts(item, await found)

    def _first(self, item: Item) -> Any:
        return list(item.completions) if self.group else item.completions[0]

    def _given(self, item: Item) -> dict[str, Any]:
        given = {
            # A copy: a function that changes a list would change the data that later answers are judged on.
            name: deepcopy(item.columns[column])
            for name, column in self.reads.items()
            if name not in self.optional or item.columns[column] is not None
        }
        if "rendered_prompt" in self.special:
            given["rendered_prompt"] = item.rendered_prompt
        if "completion_tokens" in self.special:
            given["completion_tokens"] = list(item.tokens) if self.group else item.tokens[0]
        if "conversation" in self.special:
            talks = [[dict(message) for message in talk] for talk in item.conversations]
            given["conversation"] = talks if self.group else talks[0]
        if "earned" in self.special:
            given["earned"] = list(item.earned) if self.group else item.earned[0]
        return given

    def _verdicts(self, item: Item, found: Any) -> tuple[float | None, ...]:
        if not self.group:
            return (verdict(found),)
        # None for a whole group is no verdict on any of its answers.
        values = [None] * len(item.completions) if found is None else _listed(found)
        if len(values) != len(item.completions):
            raise ValueError(
                f"the reward function returned {len(values)} values for {len(item.completions)} completions: "
                "one whose first parameter is named completions gives a list with a number for each"
            )
        return tuple(verdict(value) for value in values)


def _listed(found: Any) -> list[Any]:
    """What a function over a group gave. Raises TypeError for what is no list."""
    if isinstance(found, str | Mapping) or not hasattr(found, "__iter__"):
        raise TypeError(
            f"the reward function returned {type(found).__name__} {found!r:.80}: one whose first parameter is named completions "
            "gives a list with a number for each"
        )
    return list(found)


def is_async(function: Any) -> bool:
    """Whether calling it gives something to wait for."""
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _short(value: object) -> str:
    try:
        return f"{value!s:.80}"
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a whole number of thousands of digits"


def verdict(value: object) -> float | None:
    """None, or a finite number as float; bool and scalars of numpy and torch are numbers.

    Raises:
        TypeError: anything else. ValueError: nan or infinite.
    """
    if value is None:
        return None
    if not isinstance(value, Real) and getattr(value, "shape", None) == () and hasattr(value, "item"):
        value = value.item()
    if not isinstance(value, Real):
        one = isinstance(value, list | tuple | dict) or hasattr(value, "shape")
        hint = "; a reward function judges one completion, unless its first parameter is named completions"
        raise TypeError(
            f"the reward function returned {type(value).__name__} {value!r:.80}, not a number or None{hint if one else ''}"
        )
    try:
        number = float(value)
    except OverflowError:  # a whole number of more than 308 digits
        number = math.inf
    if not abs(number) <= LARGEST:  # nan is not
        raise ValueError(
            f"the reward function returned {_short(value)}: a reward is finite, within {LARGEST:g} of 0, or None where there is no verdict"
        )
    return number
