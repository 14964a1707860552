"""Which data a run was started with: a sum over every column of its rows, so that a resumed run notices any change.

In: the prompts of a side, in order. Out: a sha256. `inputs` and the stages call it; the run keeps it in run.yaml.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any

from gspo.types import Prompt

SIDES = {"train": "the rows to train on", "held_out": "the held-out rows"}
"""Key of a sum in run.yaml, and what it is of."""


def data_sha256(train: Iterable[Prompt], held_out: Iterable[Prompt]) -> dict[str, str]:
    """A sum for each side: of the number, rendered text and all columns of its rows, in order."""
    return {side: _sum(prompts) for side, prompts in zip(SIDES, (train, held_out), strict=True)}


def other_sides(then: object, now: Mapping[str, str]) -> list[str]:
    """In words, the sides whose sums were others `then`: what run.yaml says."""
    before = then if isinstance(then, dict) else {}
    return [what for side, what in SIDES.items() if before.get(side) != now[side]]


def _sum(prompts: Iterable[Prompt]) -> str:
    digest = hashlib.sha256()
    for prompt in prompts:
        for part in (str(prompt.row), prompt.text, *(f"{k}={_written(v)}" for k, v in prompt.columns.items())):
            data = part.encode(errors="surrogatepass")
            digest.update(b"%d " % len(data) + data)
        digest.update(b"\n")
    return digest.hexdigest()


def _written(value: Any) -> str:
    """A value in one way only: the same in every process that reads the same data."""
    try:
        return json.dumps(value, default=_plain)
    except (TypeError, ValueError, RecursionError):  # a dict with keys that are no text, or that holds itself
        return _told(value)


def _plain(value: Any) -> Any:
    """What JSON has no form for; rows from Python, Parquet and the hub may hold anything."""
    if isinstance(value, set | frozenset):  # their order changes from process to process
        return sorted(map(_told, value))
    return value.tolist() if hasattr(value, "tolist") else _told(value)


def _told(value: Any) -> str:
    """Its `repr` without addresses, which change from process to process."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", f"{type(value).__name__} {value!r}")
