"""What a row sees in the cache is its prompt and its own tokens, whoever came, left and grew beside it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from compiled import needs_kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gspo.models import native
from gspo.models.buckets import closed_up, padded
from gspo.models.cache import TreeCache

HEADS, KV_HEADS, LIMIT = 6, 2, 40


@dataclass
class Row:
    """A row as the oracle keeps it: all its keys and values, the prompt's first."""

    prompt: int
    keys: list[Tensor]
    values: list[Tensor] = field(default_factory=list)

    def attend(self, query: Tensor, window: int | None) -> Tensor:
        """query [H, D], of the last token; each softmax by its definition."""
        seen = len(self.keys) if window is None else min(window, len(self.keys))
        k, v = (torch.stack(x[-seen:]).repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.keys, self.values))
        weight = torch.softmax(torch.einsum("hd,thd->ht", query.double(), k.double()) / 3, -1)
        return torch.einsum("ht,thd->hd", weight, v.double())


class Both:
    """The cache and the oracle, driven alike with two layers: one sees everything, one a window."""

    def __init__(
        self, seed: int, windows: tuple[int | None, ...] = (None, 5), kernels: native.Kernels | None = None
    ) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.choice = np.random.default_rng(seed)
        self.cache, self.windows, self.prompts = TreeCache(LIMIT, kernels), windows, 0
        self.size, self.dtype = (8, torch.float64) if kernels is None else (32, torch.bfloat16)
        self.kept: dict[int, list[Row]] = {}  # by prompt: its own keys and values, a layer each
        self.rows: list[list[Row]] = []

    def _random(self, heads: int, tokens: int) -> Tensor:
        drawn = torch.randn(1, tokens, heads, self.size, dtype=torch.float64, generator=self.generator)
        return drawn.to(self.dtype).transpose(1, 2)

    def close(self, found: Tensor, expected: Tensor) -> None:
        loose: dict[str, float] = {} if self.dtype == torch.float64 else dict(rtol=0.03, atol=0.03)
        torch.testing.assert_close(found.double(), expected, **loose)

    def prefill(self, lengths: list[int]) -> list[int]:
        names = list(range(self.prompts, self.prompts + len(lengths)))
        self.prompts += len(lengths)
        layout = self.cache.prefill(names, lengths, "cpu")
        for name in names:
            self.kept[name] = []
        for layer, window in enumerate(self.windows):
            q, k, v = (self._random(heads, sum(lengths)) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = layout.attend(layer, q, k, v, scaling=1 / 3, window=window)
            per_token = [x[0].transpose(0, 1) for x in (q, k, v)]
            for name, end, length in zip(names, np.cumsum(lengths), lengths, strict=True):
                queries, keys, values = (list(x[end - length : end]) for x in per_token)
                row = Row(name, keys, values)
                self.kept[name].append(row)
                self.close(out[0, end - 1], row.attend(queries[-1], window))
        return names

    def add(self, prompts: list[int]) -> None:
        self.cache.add(prompts)
        self.rows += [[Row(p, row.keys[:], row.values[:]) for row in self.kept[p]] for p in prompts]

    def step(self) -> None:
        layout = self.cache.step("cpu")
        for layer, window in enumerate(self.windows):
            q, k, v = (self._random(heads, len(self.rows)) for heads in (HEADS, KV_HEADS, KV_HEADS))
            out = layout.attend(layer, q, k, v, scaling=1 / 3, window=window)
            for i, row in enumerate(self.rows):
                row[layer].keys.append(k[0, :, i])
                row[layer].values.append(v[0, :, i])
                self.close(out[0, i], row[layer].attend(q[0, :, i], window))

    def drop(self, count: int) -> None:
        gone = np.sort(self.choice.choice(len(self.rows), count, replace=False))
        self.cache.drop(gone)
        self.rows = [self.rows[i] for i in closed_up(len(self.rows), gone)]

    def release_unused(self) -> None:
        used = {row[0].prompt for row in self.rows}
        for name in [name for name in self.kept if name not in used]:
            self.cache.release(name)
            del self.kept[name]


@given(seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_row_sees_its_prompt_and_its_own_tokens(seed: int, data: st.DataObject) -> None:
    come_and_go(Both(seed), data)


@needs_kernels
@given(seed=st.integers(0, 2**16), data=st.data())
@settings(max_examples=25, deadline=None)
def test_the_kernels_see_the_same(seed: int, data: st.DataObject) -> None:
    """In bfloat16; the layer with a window is computed without them, in the same cache."""
    come_and_go(Both(seed, kernels=native.kernels()), data)


def come_and_go(both: Both, data: st.DataObject) -> None:
    lengths = st.lists(st.sampled_from([1, 3, 17, 64, 65, 130, 300]), min_size=1, max_size=4)
    for _ in range(data.draw(st.integers(1, 4))):
        if len(both.rows) < 12:
            new = both.prefill(data.draw(lengths))
            both.add(data.draw(st.permutations(new + data.draw(st.lists(st.sampled_from(new), max_size=6)))))
        for _ in range(data.draw(st.sampled_from([1, 2, 9]))):
            both.step()
        both.drop(data.draw(st.integers(0, len(both.rows) - 1)))
        both.release_unused()
        both.step()


def test_rows_may_join_a_prompt_that_is_already_there() -> None:
    """Also one whose rows have all left, and behind a prompt that was given back."""
    both = Both(3)
    first, second = both.prefill([7, 20])
    both.add([first, second, second])
    both.step()
    both.drop(3)
    both.add([second])
    both.step()
    both.release_unused()
    both.add([second, second])
    both.step()


def test_a_prompt_is_stored_once_and_given_back() -> None:
    both = Both(0)
    names = both.prefill([100, 90, 300])
    both.add([names[0]] * 8 + [names[1]] * 8 + [names[2]])
    both.step()
    assert both.cache.tokens == 2 * padded(100) + padded(300) + 17 * padded(1, 16)
    stored = {
        id(x): x.numel()
        for b in both.cache.buckets
        for t in (b.prompts, b.answers)
        for p in t._layers.values()
        for x in p
    }
    assert sum(stored.values()) == both.cache.tokens * KV_HEADS * both.size * 2 * len(both.windows)
    both.drop(16)
    both.release_unused()
    both.add([])  # room is made, and given back, when rows are added
    assert len(both.cache.buckets) == 1
    assert both.cache.tokens == padded(len(both.kept.popitem()[1][0].keys)) + padded(1, 16)


def test_room_grows_with_the_answers_up_to_the_limit() -> None:
    both = Both(1, windows=(None,))
    both.add(both.prefill([5]))
    rooms = []
    for _ in range(LIMIT):
        both.step()
        rooms.append(both.cache.tokens - padded(5))
    assert rooms[0] == 16
    assert rooms[-1] == LIMIT


@given(tokens=st.integers(1, 200_000), unit=st.sampled_from([16, 64]))
def test_room_is_little_more_than_needed(tokens: int, unit: int) -> None:
    assert tokens <= padded(tokens, unit) < tokens + max(unit, tokens / 4 + 1)
    assert padded(padded(tokens, unit), unit) == padded(tokens, unit)


@given(data=st.data(), count=st.integers(1, 30))
def test_the_last_move_up(data: st.DataObject, count: int) -> None:
    gone = np.array(sorted(data.draw(st.sets(st.integers(0, count - 1)))), dtype=np.int64)
    order = closed_up(count, gone)
    assert sorted([*order, *gone]) == list(range(count))
    moved = order != np.arange(len(order))
    assert set(np.flatnonzero(moved)) == {i for i in gone if i < len(order)}


def test_like_lengths_share_a_tensor() -> None:
    assert len({padded(n) for n in range(1, 513)}) == 8
    assert len({padded(n) for n in range(513, 4097)}) == 12
