"""The tasks of reasoning-gym by name: `reasoning-gym:chain_sum`, or with settings, `reasoning-gym:chain_sum,min_terms=2`.

In: the words after the colon. Out: rows with prompt, answer, and what the task's own scorer reads of them
(`rewards/gym.py`). `tasks/builtin.py` calls `parse`. The package is an extra, and imported when a task of it is named.
"""

from __future__ import annotations

import importlib.util
import logging
import random
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from difflib import get_close_matches
from functools import cache
from hashlib import blake2b
from typing import Any

import yaml

from gspo import written
from gspo.errors import InputError
from gspo.tasks.task import HELD_OUT, Side, limit_key

log = logging.getLogger("gspo")

NAME = "reasoning-gym"
CHUNK = 500
"""Rows of one data set of the package: some of its tasks make all rows of a data set before they give one."""
DEFAULT_ROWS: dict[Side, int] = {"train": 1024, "held_out": 128}
"""Most rows of a side when no limit is set. Fewer than of other tasks: a row may take tenths of a second to be made."""
MISSES = 400
"""Rows in a row that bring no new prompt, after which a task is taken to have no more."""
_SAY_SECONDS = 10.0
_OURS = {"size": "data.limit and eval.limit set how many rows are used"}
_PARTS = ("composite",)
"""Made of other tasks, which are named themselves."""


@dataclass(frozen=True)
class Gym:
    """A task of reasoning-gym with its settings."""

    words: str
    """As they stand behind the colon."""
    name: str
    settings: tuple[tuple[str, Any], ...] = ()

    def data_set(self, chunk: int) -> Any:
        """Rows [chunk * CHUNK, (chunk + 1) * CHUNK) of the task. Raises whatever the package thinks of the settings."""
        settings = dict(self.settings)
        # Most tasks make row i of seed s from s + i: these seeds give chunks that have no row in common.
        seed = int(settings.pop("seed", 0)) + chunk * CHUNK
        return _package().create_dataset(self.name, seed=seed, size=CHUNK, **settings)

    def choices(self) -> dict[str, Any]:
        """Every setting that the task has, with its value."""
        config = self.data_set(0).config
        return {f.name: getattr(config, f.name) for f in fields(config) if f.name not in ("seed", *_OURS)}

    def rows(self, side: Side, *, limit: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """The first `limit` rows of a side, and what there is to say about them.

        All rows stand in one stream. A hash of the prompt says on which side it is, whatever its place, the seed or the
        limits: so no prompt is on both. A prompt that came before is left out.
        """
        most = limit or DEFAULT_ROWS[side]
        what = f"{NAME}:{self.words}"
        found: dict[str, dict[str, Any]] = {}
        misses, said = 0, time.monotonic()
        for entry in _stream(self):
            prompt = str(entry["question"])
            if prompt in found or _side(prompt) != side:
                misses += 1
                if misses == MISSES:
                    break
                continue
            misses = 0
            if time.monotonic() > said + _SAY_SECONDS:
                said = time.monotonic()
                log.info("data=%s: %d of %d rows are made; %s sets fewer", what, len(found), most, limit_key(side))
            found[prompt] = {
                "prompt": prompt,
                "answer": entry["answer"],
                "task": self.words,
                "metadata": entry.get("metadata", {}),
            }
            if len(found) == most:
                break
        if not found:
            raise InputError(
                f"data={what}: among its first {MISSES} prompts none is for the {side.replace('_', '-')} side"
            )
        where = f"{what}: {len(found)} {side.replace('_', '-')} prompts"
        if len(found) < most:
            return list(found.values()), (f"{where}, which seem to be all that there are",)
        return list(found.values()), () if limit else (f"{where}; {limit_key(side)} sets how many",)


def parse(arguments: str) -> Gym:
    """The task that `NAME` or `NAME,setting=value,...` describes.

    Raises:
        InputError: the package is not installed; no such task or setting, with the nearest name; settings that the task
            refuses.
    """
    where = f"data={NAME}:{arguments}"
    if not installed():
        raise InputError(
            f"{where}: needs the package reasoning_gym, which is not installed: pip install 'gspo[{NAME}]'"
        )
    name, *words = re.split(r",(?=\s*\w+=)", arguments)
    if name not in names():
        near = get_close_matches(name, names(), n=1)
        hint = f"did you mean {NAME}:{near[0]}? " if near else ""
        raise InputError(f"{where}: no such task; {hint}`gspo tasks` lists all {len(names())}")
    settings: dict[str, Any] = {}
    known = [f.name for f in fields(_registry()[name][1]) if f.name not in _OURS]
    for word in words:
        key, _, value = (part.strip() for part in word.partition("="))
        if key in _OURS:
            raise InputError(f"{where}: {key} is not set here: {_OURS[key]}")
        if key not in known:
            near = get_close_matches(key, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise InputError(f"{where}: {name} has no setting {key!r}{hint} It has {', '.join(known)}")
        if key in settings:
            raise InputError(f"{where}: {key} is set twice")
        settings[key] = _value(value)
    task = Gym(arguments, name, tuple(settings.items()))
    try:
        task.data_set(0)
    except Exception as error:  # asserts of the package, mostly
        raise InputError(f"{where}: the task refuses its settings: {error or type(error).__name__}") from error
    return task


def _value(word: str) -> Any:
    try:
        value = written.read(word)
    except yaml.YAMLError:
        return word
    return tuple(value) if isinstance(value, list) else value


def installed() -> bool:
    return importlib.util.find_spec("reasoning_gym") is not None


@cache
def names() -> tuple[str, ...]:
    """The tasks of the installed package."""
    return tuple(sorted(set(_registry()) - set(_PARTS)))


def about(name: str) -> str:
    """A task in a line: the package's own words, or where it stands in the package."""
    found = _registry()[name][0]
    said = (found.__doc__ or "").strip().splitlines()
    return said[0].rstrip(".") if said else f"of the category {found.__module__.split('.')[1]}"


def _registry() -> dict[str, tuple[Any, Any]]:
    _package()
    from reasoning_gym.factory import DATASETS

    found: dict[str, tuple[Any, Any]] = DATASETS
    return found


def _package() -> Any:
    import reasoning_gym  # an extra

    return reasoning_gym


# ------------------------------------------------------------------------------ the stream of rows


def _side(prompt: str) -> Side:
    digest = blake2b(prompt.encode("utf-8", "surrogatepass"), digest_size=8, person=b"gspo gym").digest()
    return "held_out" if int.from_bytes(digest) < HELD_OUT * 2**64 else "train"


_MADE: dict[Gym, list[Any]] = {}
"""Rows made so far, for the other side of the same task."""


def _stream(task: Gym) -> Iterator[Any]:
    """The task's rows, one after another, for ever; row i is a function of the task and of i alone."""
    made = _MADE.setdefault(task, [])
    data: tuple[int, Any] | None = None
    place = 0
    while True:
        if place == len(made):
            chunk, inside = divmod(place, CHUNK)
            with _own_randomness(place):
                if data is None or data[0] != chunk:
                    data = chunk, task.data_set(chunk)
                made.append(data[1][inside])
        yield made[place]
        place += 1


@contextmanager
def _own_randomness(seed: int) -> Iterator[None]:
    """A few tasks draw from the generators of the process, or seed them: they have their own here, and leave no trace."""
    import numpy as np

    before, before_numpy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(before_numpy)
