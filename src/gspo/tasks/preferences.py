"""A built-in task: letters to be written in order, with answers of all qualities, of which a known rule prefers the better.

In: `preferences:N`. Out: rows with

    prompt  cab=      answer  abc;      demonstration  acb;      chosen  abc;      rejected  aacb;      gap  0.6

`answer` is the right one. The others are it with slips of the pen, as many as chance wants: two letters swapped, one
doubled, left out or wrong. The rule is the ready reward `matching`: the share of places that hold the right character.
Of two answers it prefers the one with the higher share, and `gap` is by how much. So `gspo sft` learns demonstrations,
`gspo reward` learns preferences, and `matching` tells how far a learned reward agrees with the rule. `tasks/builtin.py`
calls `parse`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

from gspo.errors import InputError
from gspo.tasks.sort import LETTERS
from gspo.tasks.task import DEFAULT_ROWS, HELD_OUT, Side, limit_key, shuffled

FEWEST, MOST = 3, 12
_SLIPS = 4
"""Most slips in an answer."""


def shared_places(text: str, right: str) -> float:
    """Share of the places of the longer text that hold the same character in both."""
    longer = max(len(text), len(right))
    return sum(a == b for a, b in zip(text, right, strict=False)) / longer if longer else 1.0


@dataclass(frozen=True)
class Preferences:
    """Lists of `letters` letters."""

    letters: int = 5

    def rows(self, side: Side, *, limit: int | None) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
        """The first `limit` rows of a side, and what there is to say about them.

        All prompts stand in one fixed shuffled order. The first quarter of them is held out, the others are trained on,
        each once.
        """
        count = len(LETTERS) ** self.letters
        held_out = int(count * HELD_OUT)
        first, total = (0, held_out) if side == "held_out" else (held_out, count - held_out)
        most = min(limit or DEFAULT_ROWS[side], total)
        rows = [self._row(shuffled(first + i, count, b"gspo preferences")) for i in range(most)]
        note = f"preferences:{self.letters}: {most} of {total} {side.replace('_', '-')} prompts; {limit_key(side)} sets how many"
        return rows, (note,) if limit is None and total > most else ()

    def _row(self, index: int) -> dict[str, Any]:
        letters = [LETTERS[index // len(LETTERS) ** k % len(LETTERS)] for k in range(self.letters)]
        right = "".join(sorted(letters)) + ";"
        chance = _Chance(f"{self.letters} {index}")
        demonstration, one, other = (_written(right, chance) for _ in range(3))
        while shared_places(one, right) == shared_places(other, right):
            other = _written(right, chance)
        worse, better = sorted((one, other), key=lambda text: shared_places(text, right))
        return {
            "prompt": "".join(letters) + "=",
            "answer": right,
            "demonstration": demonstration,
            "chosen": better,
            "rejected": worse,
            "gap": shared_places(better, right) - shared_places(worse, right),
        }


class _Chance:
    """Numbers that depend on a name alone, in every version of Python."""

    def __init__(self, name: str) -> None:
        self._name, self._drawn = name, 0

    def below(self, n: int) -> int:
        self._drawn += 1
        digest = blake2b(f"{self._name} {self._drawn}".encode(), digest_size=8, person=b"gspo slips").digest()
        return int.from_bytes(digest) % n


def _swap(text: str, i: int, chance: _Chance) -> str:
    return text[:i] + text[i + 1 : i + 2] + text[i] + text[i + 2 :]


def _double(text: str, i: int, chance: _Chance) -> str:
    return text[: i + 1] + text[i:]


def _leave_out(text: str, i: int, chance: _Chance) -> str:
    return text[:i] + text[i + 1 :]


def _mistake(text: str, i: int, chance: _Chance) -> str:
    return text[:i] + LETTERS[chance.below(len(LETTERS))] + text[i + 1 :]


_KINDS: tuple[Callable[[str, int, _Chance], str], ...] = (_swap, _double, _leave_out, _mistake)


def _written(right: str, chance: _Chance) -> str:
    """The right answer with 0 to `_SLIPS` slips; the `;` stays at the end."""
    text = right[:-1]
    for _ in range(chance.below(_SLIPS + 1)):
        kind = _KINDS[chance.below(len(_KINDS))]
        if len(text) > 1:
            text = kind(text, chance.below(len(text)), chance)
    return text + ";"


def parse(arguments: str) -> Preferences:
    """The task that `N` describes; nothing stands for 5. Raises InputError for anything else."""
    if not arguments:
        return Preferences()
    if not re.fullmatch(r"\d{1,4}", arguments) or not FEWEST <= int(arguments) <= MOST:
        raise InputError(
            f"data=preferences:{arguments}: the task is written preferences:N, with {FEWEST} to {MOST} letters, as in preferences:5"
        )
    return Preferences(int(arguments))
