"""The order in which prompts are drawn: every epoch a new permutation, for ever.

In: prompts, a seed, a position. Out: `Draw`s with the ordinals that key their random numbers. The training loop
takes from it; a checkpoint keeps `position`, which is all its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gspo.types import Prompt

_STREAM = 0x73616D706C6572
"""'sampler': its own part of the Philox counter, apart from the numbers that sample tokens."""


@dataclass(frozen=True)
class Draw:
    """One prompt, drawn once."""

    ordinal: int
    """Number of draws since the start of the run."""
    prompt: Prompt


class Sampler:
    """An endless stream of prompts; the draw with a given ordinal depends on the seed and the number of prompts alone."""

    def __init__(self, prompts: Sequence[Prompt], seed: int, position: int = 0) -> None:
        if not prompts:
            raise ValueError("a sampler needs at least one prompt")
        self.prompts = tuple(prompts)
        self.seed = seed
        self.position = position
        """Ordinal of the next draw."""
        self._epoch = -1
        self._order = np.empty(0, dtype=np.int64)

    def take(self, n: int) -> list[Draw]:
        """The next `n` draws; they may run over the end of an epoch."""
        return [self._next() for _ in range(n)]

    def _next(self) -> Draw:
        epoch, place = divmod(self.position, len(self.prompts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, _permutation(len(self.prompts), self.seed, epoch)
        draw = Draw(self.position, self.prompts[self._order[place]])
        self.position += 1
        return draw


def _permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """Sorted raw Philox words: numpy keeps these the same in all versions, which it does not promise of `permutation`."""
    stream = np.random.Philox(key=(seed % 2**64) << 64 | epoch, counter=_STREAM << 192)
    return np.argsort(stream.random_raw(count), kind="stable")
