"""Keys and values of an engine that writes token by token: each prompt once, and the answers that go on from it.

In: lengths of prompts, and which prompt each row continues. Out: layouts for `model(..., layout=)`: `Prefill`, whole
prompts; `Step`, the next token of every row; `Extend`, several tokens that are put behind some. The local engine calls it.

Letters: T tokens of a packed row, B rows, G prompts of a bucket, R rows of the prompt that has most, P prompt tokens
and C answer tokens that there is room for, H heads, K of them with keys of their own, D head size.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gspo.models.attention import Packed
from gspo.models.buckets import Bucket, closed_up, padded
from gspo.models.native import Kernels, Places


class TreeCache:
    """The prompts and rows in flight. Rows are numbered as the engine numbers them: in order of arrival, and
    `closed_up` when some leave. A prompt stays until it is released.

    `limit`: the most tokens that are written on a prompt. `kernels` attend wherever they can.
    """

    def __init__(self, limit: int, kernels: Kernels | None = None) -> None:
        self._limit, self._kernels = limit, kernels
        self._buckets: dict[int, Bucket] = {}

    @property
    def tokens(self) -> int:
        """Tokens whose keys and values there is room for."""
        return sum(b.prompts.places * b.prompts.tokens + b.answers.places * b.answers.tokens for b in self.buckets)

    @property
    def buckets(self) -> list[Bucket]:
        return list(self._buckets.values())

    def prefill(self, prompts: Sequence[Hashable], lengths: Sequence[int], device: torch.device | str) -> Prefill:
        """The layout that computes new prompts; `prompts` are what they are called from now on."""
        slots: dict[int, list[int]] = {}
        for i, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            bucket = self._buckets.setdefault(padded(length), Bucket(padded(length), self._limit))
            bucket.prompt_names.append(prompt)
            bucket.tokens_G = np.append(bucket.tokens_G, length)
            slots.setdefault(padded(length), []).append(i)
        for bucket in self.buckets:
            bucket.fit()
        targets = [(self._buckets[size], np.array(which)) for size, which in slots.items()]
        return Prefill(lengths, targets, device, self._kernels)

    def add(self, prompts: Sequence[Hashable]) -> None:
        """New rows, one for each entry, that continue these prompts."""
        first = sum(len(b.row_R) for b in self.buckets)
        for row, prompt in enumerate(prompts, first):
            bucket = next(b for b in self.buckets if prompt in b.prompt_names)
            bucket.row_R = np.append(bucket.row_R, row)
            bucket.prompt_R = np.append(bucket.prompt_R, bucket.prompt_names.index(prompt))
            bucket.written_R = np.append(bucket.written_R, 0)
        for bucket in self.buckets:
            bucket.fit()

    def drop(self, rows: np.ndarray) -> None:
        """Rows that have ended; the others close up."""
        order = closed_up(sum(len(b.row_R) for b in self.buckets), rows)
        number = np.zeros(len(order) + len(rows), dtype=np.int64)
        number[order] = np.arange(len(order))
        for bucket in self.buckets:
            bucket.drop(np.flatnonzero(np.isin(bucket.row_R, rows)))
            bucket.row_R = number[bucket.row_R]

    def release(self, prompt: Hashable) -> None:
        """Give a prompt back that no row will continue any more."""
        size, bucket = next((size, b) for size, b in self._buckets.items() if prompt in b.prompt_names)
        bucket.release(bucket.prompt_names.index(prompt))
        if not bucket.prompt_names:
            del self._buckets[size]

    def step(self, device: torch.device | str, held_B: np.ndarray | None = None) -> Step:
        """The layout of the next token of every row. Rows in `held_B` (bool) compute the same one again at the next step."""
        rows = sum(len(b.row_R) for b in self.buckets)
        held_B = np.zeros(rows, dtype=bool) if held_B is None else held_B
        return Step([_advance(b, held_B, device) for b in self.buckets if len(b.row_R)], device, self._kernels)

    def extend(self, rows: Sequence[int], firsts: Sequence[int], counts: Sequence[int]) -> Extend:
        """The layout of several tokens for each of `rows`, which stand behind its first `firsts`; what it had there goes."""
        parts = []
        for row, first, count in zip(rows, firsts, counts, strict=True):
            bucket = next(b for b in self.buckets if row in b.row_R)
            place = int(np.flatnonzero(bucket.row_R == row)[0])
            bucket.written_R[place] = first + count
            bucket.reserve()
            parts.append(_Long(bucket, place, first, count))
        return Extend(parts)


def _advance(bucket: Bucket, held_B: np.ndarray, device: torch.device | str) -> _Part:
    bucket.reserve(1)
    part = _Part(bucket, len(held_B), device)
    bucket.written_R = bucket.written_R + ~held_B[bucket.row_R]
    return part


class Prefill:
    """Whole prompts; their keys and values also go into the last slots of their buckets.

    `targets`: buckets, and which of the prompts go there.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        targets: Sequence[tuple[Bucket, np.ndarray]],
        device: torch.device | str,
        kernels: Kernels | None = None,
    ) -> None:
        self._packed = Packed(lengths, device, kernels=kernels)
        length_G = np.array(lengths)
        start_G = np.cumsum(length_G) - length_G
        self._targets: list[tuple[Bucket, int, Tensor]] = []
        for bucket, which in targets:
            # Padding repeats the last token, whose keys are at least finite; no row sees it.
            offset = np.minimum(np.arange(bucket.prompts.tokens), length_G[which, None] - 1)
            source = torch.from_numpy((start_G[which, None] + offset).ravel()).to(device)
            self._targets.append((bucket, len(which), source))

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        for bucket, count, source in self._targets:
            for kept, x in zip(bucket.prompts.layer(layer, key[0], value[0]), (key[0], value[0]), strict=True):
                new = x.index_select(1, source).view(len(x), count, -1, x.shape[2])
                kept[len(kept) - count :] = new.transpose(0, 1)
        return self._packed.attend(layer, query, key, value, scaling=scaling, window=window)


@dataclass(frozen=True)
class _Long:
    """Tokens of one row: `count` of them behind its first `first`."""

    bucket: Bucket
    place: int
    first: int
    count: int

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, scaling: float, window: int | None) -> Tensor:
        """q [H, C, D], k and v [K, C, D] -> [H, C, D]."""
        slot = int(self.bucket.prompt_R[self.place])
        prompt = int(self.bucket.tokens_G[slot])
        last = self.first + self.count
        above = self.bucket.prompts.layer(layer, k, v)
        own = self.bucket.answers.layer(layer, k, v)
        for x, new in zip(own, (k, v), strict=True):
            x[self.place, :, self.first : last] = new
        keys, values = (
            torch.cat([x[slot, :, :prompt], y[self.place, :, :last]], 1)[None] for x, y in zip(above, own, strict=True)
        )
        behind = torch.arange(prompt + self.first, prompt + last)[:, None] - torch.arange(prompt + last)
        shown = ((behind >= 0) & (behind < (prompt + last if window is None else window))).to(q.device)
        out: Tensor = scaled_dot_product_attention(
            q[None], keys, values, attn_mask=shown, scale=scaling, enable_gqa=True
        )
        return out[0]


class Extend:
    """Several new tokens for some rows: a row sees its prompt, its own tokens so far, and these up to itself."""

    def __init__(self, parts: Sequence[_Long]) -> None:
        self._parts = parts

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        counts = [part.count for part in self._parts]
        q, k, v = (torch.split(x[0], counts, 1) for x in (query, key, value))
        outs = [
            part.attend(layer, *each, scaling=scaling, window=window)
            for part, *each in zip(self._parts, q, k, v, strict=True)
        ]
        return torch.cat(outs, 1).transpose(0, 1)[None]


class Step:
    """One new token for each row: seen are the prompt, the row's own tokens so far, and itself."""

    def __init__(self, parts: Sequence[_Part], device: torch.device | str, kernels: Kernels | None = None) -> None:
        self._parts, self._kernels = parts, kernels
        back = np.argsort(np.concatenate([part.bucket.row_R for part in parts]))
        self._back_B = None if parts[0].row_R is None else torch.from_numpy(back).to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        q, k, v = query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1)  # [B, H, D]
        if self._kernels is not None and window is None and self._kernels.attends(q, k, v):
            out = q.new_empty(q.shape)
            for part in self._parts:
                part.attend_natively(self._kernels, layer, (q, k, v), scaling, out)
            return out[None]
        q = q * scaling
        outs = [part.attend(layer, *(part.own(x) for x in (q, k, v)), window=window) for part in self._parts]
        return (outs[0] if self._back_B is None else torch.cat(outs).index_select(0, self._back_B))[None]


@dataclass(frozen=True)
class _Places:
    """Where things lie, for one number K of key heads."""

    store: Tensor
    """[R K] the new token's place among a row's answer tokens, in the flat [R K C]."""
    grid: Tensor
    """[G K rows] the row and head, in the flat [R K], of each cell of the grid; any row where there are fewer."""
    cell: Tensor
    """[R K] the cell of each row and head."""


class _Part:
    """A step of one bucket. The queries of all rows of a prompt form one matrix: the grid [G, K, rows of a prompt].

    Prompts with fewer rows than others leave cells of the grid empty; what is computed there is not used.
    """

    def __init__(self, bucket: Bucket, rows: int, device: torch.device | str) -> None:
        self.bucket, self._device = bucket, device
        alone = np.array_equal(bucket.row_R, np.arange(rows))
        self.row_R = None if alone else torch.from_numpy(bucket.row_R).to(device)
        count_G = np.bincount(bucket.prompt_R, minlength=len(bucket.prompt_names))
        self._side = int(count_G.max())
        order = np.argsort(bucket.prompt_R, kind="stable")
        self._rank_R = np.empty_like(order)
        self._rank_R[order] = np.arange(len(order)) - (np.cumsum(count_G) - count_G)[bucket.prompt_R[order]]
        self._written_R = bucket.written_R
        first_G = np.concatenate([[0], count_G.cumsum()])
        self._in_order = Places(first_G, order, bucket.row_R[order], bucket.written_R[order], bucket.tokens_G)
        self._places: dict[int, _Places] = {}
        self._masks: dict[tuple[int | None, torch.dtype], Tensor] = {}

    def own(self, x: Tensor) -> Tensor:
        """The rows of this bucket, in its order."""
        return x if self.row_R is None else x.index_select(0, self.row_R)

    def attend_natively(
        self, kernels: Kernels, layer: int, qkv: tuple[Tensor, Tensor, Tensor], scaling: float, out: Tensor
    ) -> None:
        """`attend` of all rows of the step [B, _, D]; writes those of this bucket into `out` [B, H, D]."""
        key, value = (x.transpose(0, 1) for x in qkv[1:])
        prompt = self.bucket.prompts.layer(layer, key, value)
        own = self.bucket.answers.layer(layer, key, value)
        kernels.attend(qkv, prompt, own, self._in_order, scaling=scaling, out=out)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None) -> Tensor:
        """q [R, H, D], scaled; k and v [R, K, D] -> [R, H, D]."""
        rows, heads, size = q.shape
        at = self._at(k.shape[1])
        prompt_k, prompt_v = (
            x[: len(self.bucket.prompt_names)].flatten(0, 1)
            for x in self.bucket.prompts.layer(layer, k.transpose(0, 1), v.transpose(0, 1))
        )
        own_k, own_v = self._store(layer, k, v, at.store)
        share = heads // k.shape[1]
        q = q.reshape(-1, share, size)  # [R K, share, D]
        inner = torch.bmm(q, own_k.transpose(1, 2)).index_select(0, at.grid)
        outer = torch.bmm(q.index_select(0, at.grid).view(len(prompt_k), -1, size), prompt_k.transpose(1, 2))
        scores = torch.cat([outer.view(len(inner), share, -1), inner], -1)
        grid = scores.view(-1, k.shape[1], self._side, share, scores.shape[-1])
        weight = torch.softmax(grid.add_(self._mask(window, q.dtype)), -1).view_as(scores)
        outer, inner = weight.tensor_split((prompt_k.shape[1],), -1)
        out = torch.bmm(outer.reshape(len(prompt_v), -1, prompt_k.shape[1]), prompt_v)
        out = out.view(len(weight), share, -1).index_select(0, at.cell)
        return out.add_(torch.bmm(inner.index_select(0, at.cell), own_v)).view(rows, heads, -1)

    def _store(self, layer: int, k: Tensor, v: Tensor, place: Tensor) -> list[Tensor]:
        """Keep the new tokens' keys and values; all that are kept of the rows, [R K, C, D].

        With the room that is still empty: a product copies what is not contiguous.
        """
        kept = []
        for x, new in zip(self.bucket.answers.layer(layer, k.transpose(0, 1), v.transpose(0, 1)), (k, v), strict=True):
            x.view(-1, x.shape[3]).index_copy_(0, place, new.reshape(-1, x.shape[3]))
            kept.append(x[: len(k)].flatten(0, 1))
        return kept

    def _at(self, kv_heads: int) -> _Places:
        if kv_heads not in self._places:
            prompt_R, room = self.bucket.prompt_R, self.bucket.answers.tokens
            head, row = np.arange(kv_heads), np.arange(len(prompt_R))
            store = (row[:, None] * kv_heads + head) * room + self._written_R[:, None]
            cell = (prompt_R[:, None] * kv_heads + head) * self._side + self._rank_R[:, None]
            grid = np.zeros(len(self.bucket.prompt_names) * kv_heads * self._side, dtype=np.int64)
            grid[cell.ravel()] = np.arange(cell.size)
            self._places[kv_heads] = _Places(
                *(torch.from_numpy(x.ravel()).to(self._device) for x in (store, grid, cell))
            )
        return self._places[kv_heads]

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[G, 1, side, 1, P + C]: 0 where a key is seen, -inf elsewhere."""
        if (window, dtype) not in self._masks:
            tokens_G = self.bucket.tokens_G
            written = np.zeros((len(tokens_G), self._side), dtype=np.int64)
            written[self.bucket.prompt_R, self._rank_R] = self._written_R
            outer = np.arange(self.bucket.prompts.tokens) - tokens_G[:, None]
            inner = np.arange(self.bucket.answers.tokens)
            # Places counted from the prompt's end: of the query, and of the keys.
            place = np.concatenate([outer, np.broadcast_to(inner, (len(tokens_G), len(inner)))], 1)
            behind = written[:, :, None] - place[:, None]
            hidden = behind < 0
            hidden[:, :, : outer.shape[1]] |= (outer >= 0)[:, None]
            if window is not None:
                hidden |= behind >= window
            mask = np.where(hidden, -np.inf, 0.0)[:, None, :, None]
            self._masks[window, dtype] = torch.from_numpy(mask).to(dtype=dtype, device=self._device)
        return self._masks[window, dtype]
