"""What a built-in task is: rows made by rule, in an order that nothing but the task's own words can change.

`addition.py` and `sort.py` are such tasks; `builtin.py` finds them by name, `data.py` reads their rows.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal, Protocol

Side = Literal["train", "held_out"]
DEFAULT_ROWS: dict[Side, int] = {"train": 4096, "held_out": 512}
"""Most rows of a side when no limit is set: a task may have billions."""
HELD_OUT = 0.25
"""Share of a task's prompts that training never sees."""


class Task(Protocol):
    """A source of rows."""

    def rows(self, side: Side, *, limit: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """The first `limit` rows of a side (by default `DEFAULT_ROWS`), and what there is to say about them.

        Row i of a side is a function of the task and of i alone: never of a seed or a limit. No prompt is on both sides.
        """
        ...


def limit_key(side: Side) -> str:
    """The key that sets how many rows of a side are used."""
    return "data.limit" if side == "train" else "eval.limit"


def shuffled(place: int, count: int, stream: bytes) -> int:
    """The index at `place` of a fixed permutation of range(count), without building it; `stream` tells tasks apart.

    A Feistel network permutes range(4^h) >= count; walking its cycle until it comes back into range(count)
    permutes that. hashlib, because numpy does not promise the same shuffle in the next version.
    """
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    index = place
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = blake2b(f"{turn} {right} {count}".encode(), digest_size=16, person=stream).digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        index = (left << half) | right
        if index < count:
            return index
