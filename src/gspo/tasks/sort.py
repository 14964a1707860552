"""A built-in task: letters sorted by insertion, every step of it written out.

In: `sort:N`, or `sort:N,M,...` for prompts of several lengths in turn. Out: rows with prompt and answer, as in

    prompt  cab=        answer  a:a;c:ac;b:abc;

The letters are taken in a random order, so that the answer branches as a chain of thought does: N + 1 tokens of prompt,
and, with the token that ends it, N (N + 1) / 2 + 3 N + 1 of answer (N=8: 61), where one token is one character. The
rule `sorted` judges the last list alone. `tasks/builtin.py` calls it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Any

from gspo.errors import InputError
from gspo.tasks.task import DEFAULT_ROWS, HELD_OUT, Side, limit_key, shuffled

LETTERS = "abcdefghijklmnopqrst"
LONGEST = 40


@dataclass(frozen=True)
class Sort:
    """Prompts of `lengths` letters, in turn; a length that stands twice comes twice as often."""

    lengths: tuple[int, ...] = (8,)

    def rows(self, side: Side, *, limit: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """The first `limit` rows of a side, and what there is to say about them.

        All prompts of a length stand in one fixed shuffled order. The first quarter of them is held out, the others
        are trained on, each once. The rows end where those of a length do.
        """
        most = limit or DEFAULT_ROWS[side]
        rows = list(islice(self._all(side), most))
        total = self._turns(side) * len(self.lengths)
        name = ",".join(map(str, self.lengths))
        note = f"sort:{name}: {most} of {total} {side.replace('_', '-')} prompts; {limit_key(side)} sets how many"
        return rows, (note,) if limit is None and total > most else ()

    def _all(self, side: Side) -> Iterator[dict[str, Any]]:
        share = Counter(self.lengths)
        for turn in range(self._turns(side)):
            seen: Counter[int] = Counter()
            for n in self.lengths:
                place = turn * share[n] + seen[n] + (0 if side == "held_out" else _held_out(n))
                seen[n] += 1
                yield _row(n, shuffled(place, len(LETTERS) ** n, b"gspo sort"))

    def _turns(self, side: Side) -> int:
        """How often each length gets its turn until one has no prompts left."""
        left = {n: _held_out(n) if side == "held_out" else len(LETTERS) ** n - _held_out(n) for n in self.lengths}
        return min(left[n] // times for n, times in Counter(self.lengths).items())


def parse(arguments: str) -> Sort:
    """The task that `N` or `N,M,...` describes; nothing stands for 8. Raises InputError for anything else."""
    if not arguments:
        return Sort()
    words = arguments.split(",")
    if not all(re.fullmatch(r"\d{1,4}", word) and 1 <= int(word) <= LONGEST for word in words):
        raise InputError(
            f"data=sort:{arguments}: the task is written sort:N, with 1 to {LONGEST} letters, or sort:N,M,... for several "
            "lengths in turn, as in sort:8 or sort:5,8,10"
        )
    return Sort(tuple(int(word) for word in words))


def _held_out(n: int) -> int:
    return int(len(LETTERS) ** n * HELD_OUT)


def _row(n: int, index: int) -> dict[str, Any]:
    """The prompt whose letters are the digits of `index`, and one of its answers."""
    letters = [LETTERS[index // len(LETTERS) ** k % len(LETTERS)] for k in range(n)]
    order = sorted(range(n), key=lambda k: blake2b(f"{n} {index} {k}".encode(), person=b"gspo sort order").digest())
    taken, steps = "", []
    for k in order:
        taken = "".join(sorted(taken + letters[k]))
        steps.append(f"{letters[k]}:{taken};")
    return {"prompt": "".join(letters) + "=", "answer": "".join(steps)}
