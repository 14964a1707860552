"""A built-in task: sums of two whole numbers, split by operand pair into training and held-out.

In: `addition:LOW-HIGH`. Out: rows with prompt, answer, a and b. `tasks/builtin.py` calls it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import isqrt
from typing import Any, ClassVar, TypeVar

from gspo.errors import InputError
from gspo.tasks.task import DEFAULT_ROWS, HELD_OUT, Side, limit_key, shuffled

DIGITS = 18
"""Most of an operand: those of larger numbers have no place in a model's answer, nor their pairs in a float64."""


@dataclass(frozen=True)
class Addition:
    """Sums of operands in [low, high]."""

    low: int = 1
    high: int = 20
    held_out: float = HELD_OUT
    """Share of the operand pairs that training never sees."""

    name: ClassVar[str] = "addition"
    what: ClassVar[str] = "sums"

    @property
    def pairs(self) -> int:
        """Unordered operand pairs."""
        width = self.high - self.low + 1
        return width * (width + 1) // 2

    def rows(self, side: Side, *, limit: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """The first `limit` rows of a side, and what there is to say about them.

        The unordered pairs stand in one fixed shuffled order. The first `held_out` of them are held out, the others
        are trained on; each gives a + b and then b + a.
        """
        held_out = min(max(round(self.held_out * self.pairs), 1), self.pairs - 1)
        places = range(held_out) if side == "held_out" else range(held_out, self.pairs)
        total = places.stop - places.start  # `len` stops at 2^63
        most = limit or DEFAULT_ROWS[side]
        rows: list[dict[str, Any]] = []
        for place in places:
            a, b = _pair(shuffled(place, self.pairs, f"gspo {self.name}".encode()))
            both = [(a, b), (b, a)] if a != b else [(a, b)]
            rows += [self.row(self.low + x, self.low + y) for x, y in both]
            if len(rows) >= most:
                break
        cut = limit is None and (len(rows) > most or place != places.stop - 1)
        said = f"{most} of about {2 * total} {side.replace('_', '-')} {self.what}"
        note = f"{self.name} of {self.low}..{self.high}: {said}; {limit_key(side)} sets how many"
        return rows[:most], (note,) if cut else ()

    def row(self, a: int, b: int) -> dict[str, Any]:
        """The row of one pair of operands."""
        return {"prompt": f"What is {a} + {b}? Answer with just the number.", "answer": str(a + b), "a": a, "b": b}


A = TypeVar("A", bound=Addition)


def parse(arguments: str) -> Addition:
    """The task that `LOW-HIGH` describes; nothing stands for 1-20. Raises InputError for anything else."""
    return parse_as(Addition, arguments)


def parse_as(kind: type[A], arguments: str) -> A:
    """A task on pairs of numbers from `LOW-HIGH`. Raises InputError for words that are none."""
    if not arguments:
        return kind()
    found = re.fullmatch(rf"(-?\d{{1,{DIGITS}}})-(-?\d{{1,{DIGITS}}})", arguments)
    where = f"data={kind.name}:{arguments}"
    if found is None:
        raise InputError(
            f"{where}: the task is written {kind.name}:LOW-HIGH, smallest and largest operand, of at most {DIGITS} digits, as in {kind.name}:1-9"
        )
    task = kind(int(found[1]), int(found[2]))
    if task.low > task.high:
        raise InputError(f"{where}: {task.low} is larger than {task.high}: there are no operands between them")
    if task.pairs < 2:
        raise InputError(f"{where}: one operand pair cannot be split into training and held-out; widen the range")
    return task


def _pair(index: int) -> tuple[int, int]:
    """The unordered pair 0 <= a <= b with this index, counting (0,0), (0,1), (1,1), (0,2), ..."""
    b = (isqrt(8 * index + 1) - 1) // 2
    return index - b * (b + 1) // 2, b
