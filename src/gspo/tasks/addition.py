"""The built-in task: sums of two whole numbers, split by operand pair into training and held-out.

In: `config.Data` (`low`, `high`, `held_out`). Out: rows with prompt, answer, a and b. `tasks/data.py` calls it.
"""

from __future__ import annotations

from hashlib import blake2b
from math import isqrt
from typing import Any, Literal

from gspo.config import Data
from gspo.errors import InputError

Side = Literal["train", "held_out"]
DEFAULT_ROWS: dict[Side, int] = {"train": 4096, "held_out": 512}
"""Most rows of a side when no limit is set: the pairs of 10..999 would be a million rows."""


def read(data: Data, side: Side, *, limit: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The first `limit` rows of a side, and what there is to say about them.

    The unordered pairs of [low, high] stand in one fixed shuffled order. The first `held_out` of them are held out,
    the others are trained on; each gives a + b and then b + a. Which side a pair is on depends on low, high and
    held_out alone: never on the seed, nor on a limit.

    Raises:
        InputError: low > high, or a range with a single pair.
    """
    if data.low > data.high:
        raise InputError(
            f"data.low={data.low} is larger than data.high={data.high}: there are no operands between them"
        )
    width = data.high - data.low + 1
    pairs = width * (width + 1) // 2
    if pairs < 2:
        raise InputError(
            f"data.low=data.high={data.low}: one operand pair cannot be split into training and held-out; widen the range"
        )
    held_out = min(max(round(data.held_out * pairs), 1), pairs - 1)
    places = range(held_out) if side == "held_out" else range(held_out, pairs)
    most = limit or DEFAULT_ROWS[side]
    rows: list[dict[str, Any]] = []
    for place in places:
        a, b = _pair(_shuffled(place, pairs))
        both = [(a, b), (b, a)] if a != b else [(a, b)]
        rows += [_row(data.low + x, data.low + y) for x, y in both]
        if len(rows) >= most:
            break
    cut = limit is None and (len(rows) > most or place != places[-1])
    key = "data.limit" if side == "train" else "eval.limit"
    note = f"addition of {data.low}..{data.high}: {most} of about {2 * len(places)} {side.replace('_', '-')} sums; {key} sets how many"
    return rows[:most], (note,) if cut else ()


def _row(a: int, b: int) -> dict[str, Any]:
    return {"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b), "a": a, "b": b}


def _pair(index: int) -> tuple[int, int]:
    """The unordered pair 0 <= a <= b with this index, counting (0,0), (0,1), (1,1), (0,2), ..."""
    b = (isqrt(8 * index + 1) - 1) // 2
    return index - b * (b + 1) // 2, b


def _shuffled(place: int, count: int) -> int:
    """The index at `place` of a fixed permutation of range(count), without building it.

    A Feistel network permutes range(4^h) >= count; walking its cycle until it comes back into range(count)
    permutes that. hashlib, because numpy does not promise the same shuffle in the next version.
    """
    half = ((count - 1).bit_length() + 1) // 2
    mask = (1 << half) - 1
    index = place
    while True:
        left, right = index >> half, index & mask
        for turn in range(4):
            digest = blake2b(f"{turn} {right} {count}".encode(), digest_size=16, person=b"gspo addition").digest()
            left, right = right, left ^ (int.from_bytes(digest) & mask)
        index = (left << half) | right
        if index < count:
            return index
