"""What a conversation leaves: lines of tokens after a prompt, of which each later one goes on from within the one before.

In: the tokens of each line, and where it leaves the line before. Out: `types.Segment`s, in which every token stands once.
The local engine calls it. Numpy only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gspo.types import Segment


@dataclass(frozen=True)
class Line:
    """The tokens of a line that are its own."""

    start: int
    """Tokens after the prompt that it shares with the line before; 0 of the first line."""
    own: Segment
    """What follows them; `parent` is not set."""

    @property
    def end(self) -> int:
        return self.start + len(self.own.token_ids)


def segments(lines: Sequence[Line]) -> tuple[Segment, ...]:
    """The tree of the lines: a line that others leave is cut where they do, so that a segment hangs on whole segments."""
    if len(lines) == 1:
        return (lines[0].own,)
    forks = _forks(lines)
    place: dict[tuple[int, int], int] = {}  # the segment that ends at this token of this line
    found: list[Segment] = []
    for number, line in enumerate(lines):
        fork = forks[number]
        parent = None if fork is None else place[fork]
        cuts = {at for owner, at in filter(None, forks) if owner == number}
        first = line.start
        for last in sorted(cuts | {line.end}):
            found.append(_cut(line, first, last, parent))
            parent = place[number, last] = len(found) - 1
            first = last
    return tuple(found)


def _forks(lines: Sequence[Line]) -> list[tuple[int, int] | None]:
    """Of each line: whose tokens it leaves, and after which; None where it goes on from the prompt."""
    path: list[tuple[int, int]] = []  # of the line at hand: whose tokens they are, and up to which
    forks: list[tuple[int, int] | None] = []
    for number, line in enumerate(lines):
        above: list[tuple[int, int]] = []
        for owner, last in path:
            above.append((owner, min(last, line.start)))
            if last >= line.start:
                break
        above = above if line.start else []
        forks.append(above[-1] if above else None)
        path = [*above, (number, line.end)]
    return forks


def _cut(line: Line, first: int, last: int, parent: int | None) -> Segment:
    part = slice(first - line.start, last - line.start)
    own = line.own
    routes = None if own.routes is None else own.routes[part]
    return Segment(own.token_ids[part], own.policy_mask[part], own.logprobs[part], parent, routes)
