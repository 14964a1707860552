"""Layouts of an engine that writes token by token: prompts whose keys and values are kept, and one step for every row.

In: the lengths of prompts, the places of the rows. Out: layouts for `model(..., layout=)`. The local engine makes them.

Letters: T tokens of the packed row, B rows of the cache, L longest sequence, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gspo.models.attention import Packed


class KeyValues:
    """Keys and values of the answers being written: [rows, Hkv, capacity, D] a layer, in the compute dtype.

    Memory is taken at the first use, from the shapes that arrive. Rows [0, B) are in use.
    """

    def __init__(self) -> None:
        self._layers: dict[int, tuple[Tensor, Tensor]] = {}
        self.rows = 0
        self.capacity = 0

    def reserve(self, rows: int, tokens: int) -> None:
        """Make room for `rows` rows of `tokens` tokens; what is stored stays."""
        if rows <= self.rows and tokens <= self.capacity:
            return
        self.rows, self.capacity = max(rows, self.rows), max(tokens, self.capacity)
        self._layers = {layer: (self._grown(k), self._grown(v)) for layer, (k, v) in self._layers.items()}

    def _grown(self, old: Tensor) -> Tensor:
        new = old.new_zeros(self.rows, old.shape[1], self.capacity, old.shape[3])
        new[: old.shape[0], :, : old.shape[2]] = old
        return new

    def layer(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """The buffers of a layer; `key` and `value` [_, Hkv, _, D] give the shapes of the first call."""
        if layer not in self._layers:
            # Zeros: a masked key still meets the softmax's zero in a product, where NaN would survive.
            shapes = [(self.rows, x.shape[1], self.capacity, x.shape[3]) for x in (key, value)]
            self._layers[layer] = (key.new_zeros(shapes[0]), value.new_zeros(shapes[1]))
        return self._layers[layer]

    def move(self, source: Tensor, target: Tensor, tokens: int) -> None:
        """Copy the first `tokens` of rows `source` over rows `target`; the two must not overlap."""
        for pair in self._layers.values():
            for buffer in pair:
                buffer[target, :, :tokens] = buffer[source, :, :tokens]


class Prefill:
    """Whole prompts, whose keys and values also go into rows [first, first + len(owner)) of the cache.

    `owner` [rows]: the prompt, as an index into `lengths`, that each row continues.
    """

    def __init__(
        self, lengths: Sequence[int], cache: KeyValues, *, first: int, owner: Tensor, device: torch.device | str
    ) -> None:
        self._packed = Packed(lengths, device)
        self._lengths = list(lengths)
        self._cache, self._rows, self._owner = cache, slice(first, first + len(owner)), owner.to(device)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        for buffer, x in zip(self._cache.layer(layer, key, value), (key, value), strict=True):
            each = torch.nn.utils.rnn.pad_sequence(x[0].transpose(0, 1).split(self._lengths), batch_first=True)
            buffer[self._rows, :, : each.shape[1]] = each.transpose(1, 2).index_select(0, self._owner)
        return self._packed.attend(layer, query, key, value, scaling=scaling, window=window)


class Step:
    """One new token for each of the rows [0, B) of the cache. `position_B`: its place in its sequence."""

    def __init__(self, cache: KeyValues, position_B: Tensor) -> None:
        self._cache, self._position_B = cache, position_B
        self._row_B = torch.arange(len(position_B), device=position_B.device)
        self._longest = int(position_B.max()) + 1
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))  # [B, H, D]
        keys, values = self._cache.layer(layer, key, value)
        keys[self._row_B, :, self._position_B] = k
        values[self._row_B, :, self._position_B] = v
        rows = len(self._row_B)
        out = scaled_dot_product_attention(
            q[:, :, None],
            keys[:rows, :, : self._longest],
            values[:rows, :, : self._longest],
            attn_mask=self._mask(window, q.dtype),
            scale=scaling,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        return out.transpose(1, 2).reshape(1, rows, q.shape[1], -1)

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """[B, 1, 1, longest]: 0 where a key is seen, -inf elsewhere."""
        if window not in self._masks:
            behind = self._position_B[:, None] - torch.arange(self._longest, device=self._position_B.device)
            hidden = behind < 0
            if window is not None:
                hidden |= behind >= window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
            self._masks[window] = mask[:, None, None]
        return self._masks[window]
