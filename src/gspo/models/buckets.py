"""The memory of an engine's cache: prompts padded to one of few lengths, and the rows that continue them.

In: which prompts and rows there are. Out: their keys and values, layer by layer. `cache` calls it.

Letters: G prompts of a bucket, R rows of it, K heads that have keys of their own, D head size.
"""

from __future__ import annotations

from collections.abc import Hashable

import numpy as np
import torch
from torch import Tensor

_PROMPT_UNIT, _ANSWER_UNIT = 64, 16


def padded(tokens: int, unit: int = _PROMPT_UNIT) -> int:
    """Room that is made for `tokens`: one of few lengths, less than `unit` tokens, or else a quarter, more."""
    octave: int = 2 ** tokens.bit_length()
    unit = max(unit, octave // 8)
    return -(-tokens // unit) * unit


def closed_up(count: int, gone: np.ndarray) -> np.ndarray:
    """Which of `count` places each remaining place is filled from, once those in `gone` are empty: the last move up."""
    stays = np.setdiff1d(np.arange(count), gone)
    order = np.arange(len(stays))
    order[gone[gone < len(stays)]] = stays[stays >= len(stays)]
    return order


class Pairs:
    """A tensor of keys and one of values, [places, K, tokens, D], for each layer, in the model's dtype.

    Memory is taken when the first ones arrive. Zeros: a masked key still meets the softmax's zero in a product, where
    NaN would survive.
    """

    def __init__(self, tokens: int) -> None:
        self.places, self.tokens = 0, tokens
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """`key` and `value` [K, _, D] give the shapes at the first call."""
        if layer not in self._layers:
            k, v = (x.new_zeros(self.places, x.shape[0], self.tokens, x.shape[2]) for x in (key, value))
            self._layers[layer] = (k, v)
        return self._layers[layer]

    def resize(self, places: int, tokens: int) -> None:
        """What is stored stays, as far as it has a place."""
        if (places, tokens) == (self.places, self.tokens):
            return
        self.places, self.tokens = places, tokens
        for layer, (key, value) in self._layers.items():  # one at a time: the old ones are freed on the way
            self._layers[layer] = (self._resized(key), self._resized(value))

    def _resized(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.places, old.shape[1], self.tokens, old.shape[3])
        places, tokens = min(len(old), self.places), min(old.shape[2], self.tokens)
        new[:places, :, :tokens] = old[:places, :, :tokens]
        return new

    def move(self, source: np.ndarray, target: np.ndarray) -> None:
        """Copy places over others; the two must not overlap."""
        if len(source) == 0:
            return
        for pair in self._layers.values():
            for x in pair:
                x[torch.from_numpy(target)] = x[torch.from_numpy(source)]


class Bucket:
    """Prompts that are padded to one length, each at a slot, and the rows that continue them, each at a place."""

    def __init__(self, length: int, limit: int) -> None:
        self.prompts, self.answers, self._limit = Pairs(length), Pairs(0), limit
        self.prompt_names: list[Hashable] = []
        self.tokens_G = np.zeros(0, dtype=np.int64)
        self.row_R = np.zeros(0, dtype=np.int64)
        """The engine's row at each place, ..."""
        self.prompt_R = np.zeros(0, dtype=np.int64)
        """... the slot of its prompt, ..."""
        self.written_R = np.zeros(0, dtype=np.int64)
        """... and the answer tokens whose keys are stored."""

    def fit(self) -> None:
        """As much room as there are prompts and rows."""
        self.prompts.resize(len(self.prompt_names), self.prompts.tokens)
        self.answers.resize(len(self.row_R), self.answers.tokens)

    def drop(self, places: np.ndarray) -> None:
        order = closed_up(len(self.row_R), places)
        target = np.flatnonzero(order != np.arange(len(order)))
        self.answers.move(order[target], target)
        self.row_R, self.prompt_R, self.written_R = self.row_R[order], self.prompt_R[order], self.written_R[order]

    def release(self, slot: int) -> None:
        last = len(self.prompt_names) - 1
        if slot != last:
            self.prompts.move(np.array([last]), np.array([slot]))
        self.prompt_names[slot], self.tokens_G[slot] = self.prompt_names[last], self.tokens_G[last]
        self.prompt_names.pop()
        self.tokens_G = self.tokens_G[:last]
        self.prompt_R[self.prompt_R == last] = slot

    def reserve(self, more: int = 0) -> None:
        """Room for all that is written, and `more` tokens of each row."""
        longest = int(self.written_R.max()) + more
        if longest > self.answers.tokens:
            self.answers.resize(self.answers.places, min(padded(longest, _ANSWER_UNIT), self._limit))
