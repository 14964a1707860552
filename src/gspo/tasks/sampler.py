"""The order in which prompts are drawn: every epoch a new permutation, for ever; prompts of the wrong difficulty skipped.

In: prompts, a seed, a position, and what is known of the prompts' difficulty. Out: `Draw`s with the ordinals that key
their random numbers. `drawing` takes from it and tells it how the answers did; a checkpoint keeps `position` and
`seen`, which are all its state.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from gspo.types import Prompt

_STREAM = 0x73616D706C6572
"""'sampler': its own part of the Philox counter, apart from the numbers that sample tokens."""
LOOK_AGAIN = 4
"""Turns until a prompt that was too easy or too hard is drawn again: the policy, and so its difficulty, changes."""


@dataclass(frozen=True)
class Draw:
    """One prompt, drawn once."""

    ordinal: int
    """Its place in the stream of all epochs: the number of turns before it since the start of the run."""
    prompt: Prompt


@dataclass(frozen=True)
class Seen:
    """What is known of a prompt's difficulty."""

    row: int
    solved: float
    """Share of its answers that were solved: of the last draw and of what stood here before it, half and half."""
    skipped: int = 0
    """Turns that it has been skipped since it was drawn last."""


class Sampler:
    """An endless stream of prompts; the turn with a given ordinal depends on the seed and the number of prompts alone.

    With a `band`, a prompt whose share of solved answers lies outside is skipped at its turns, but for every
    `LOOK_AGAIN`-th. A prompt that was never drawn is drawn, so that each is at least once in `LOOK_AGAIN` epochs.
    """

    def __init__(
        self,
        prompts: Sequence[Prompt],
        seed: int,
        position: int = 0,
        *,
        band: tuple[float, float] | None = None,
        seen: Iterable[Seen] = (),
    ) -> None:
        if not prompts:
            raise ValueError("a sampler needs at least one prompt")
        self.prompts = tuple(prompts)
        self.seed = seed
        self.position = position
        """Ordinal of the next turn."""
        self.skipped = 0
        """Turns skipped by this sampler."""
        self._band = band
        self._seen = {each.row: each for each in seen}
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    @property
    def seen(self) -> tuple[Seen, ...]:
        """By row; empty without a band, which alone needs it."""
        return tuple(self._seen[row] for row in sorted(self._seen))

    def take(self, n: int) -> list[Draw]:
        """The next `n` draws; they may run over the end of an epoch."""
        draws: list[Draw] = []
        while len(draws) < n:
            draw = self._turn()
            if self._skip(draw.prompt.row):
                self.skipped += 1
            else:
                draws.append(draw)
        return draws

    def learn(self, row: int, solved: float) -> None:
        """What share of a prompt's judged answers was solved, at its latest draw."""
        if self._band is not None:
            before = self._seen.get(row)
            self._seen[row] = Seen(row, solved if before is None else (before.solved + solved) / 2)

    def _turn(self) -> Draw:
        epoch, place = divmod(self.position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _permutation(len(self.prompts), self.seed, epoch)
        draw = Draw(self.position, self.prompts[self._order[place]])
        self.position += 1
        return draw

    def _skip(self, row: int) -> bool:
        known = self._seen.get(row)
        if self._band is None or known is None or self._band[0] <= known.solved <= self._band[1]:
            return False
        skip = known.skipped + 1 < LOOK_AGAIN
        self._seen[row] = replace(known, skipped=known.skipped + 1 if skip else 0)
        return skip


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Sorted raw Philox words: numpy keeps these the same in all versions, which it does not promise of `permutation`."""
    stream = np.random.Philox(key=(seed % 2**64) << 64 | epoch, counter=_STREAM << 192)
    return np.argsort(stream.random_raw(count), kind="stable")
