"""Attention over one packed row: a layout says which tokens see which, and the model only hands over q, k, v.

In: a transformers model whose attention is set to `ATTENTION`, called with `layout=`. Out: attention output
without padding outside this file. `heads` passes layouts through; the learner makes `Packed`, the engine the rest.

Letters: T tokens of the packed row, S sequences, B rows of the cache, L longest sequence, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from gspo.errors import InputError

ATTENTION = "gspo"

# Up to this length a CPU is faster with plain products, forward and backward together: SDPA's flash kernel has a
# slow backward there. The choice may depend on the layout only, so that a pass without gradients gives the same bits.
_PLAIN_LENGTH = 512


class Layout(Protocol):
    """What `model(..., layout=...)` takes."""

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D].

        A token sees the earlier tokens of its own sequence, the last `window` of them (itself among them) if set.
        """
        ...


class Packed:
    """Whole sequences laid end to end.

    `lengths` [S], in tokens. Inside, sequences are padded on the right to the longest one, which causality makes
    harmless: a token never sees what comes after it.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device | str = "cpu") -> None:
        length_S = torch.tensor(list(lengths), dtype=torch.int64)
        if len(length_S) == 0 or int(length_S.min()) < 1:
            raise ValueError(f"a packed row needs sequences of at least one token, found lengths {list(lengths)}")
        self.sequences, self.longest = len(length_S), int(length_S.max())
        self.even = bool((length_S == self.longest).all())
        sequence_T = torch.repeat_interleave(torch.arange(self.sequences), length_S)
        start_T = (length_S.cumsum(0) - length_S)[sequence_T]
        offset_T = torch.arange(len(sequence_T)) - start_T
        self.slot_T = (sequence_T * self.longest + offset_T).to(device)
        self._hidden: dict[int | None, Tensor] = {}

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None
    ) -> Tensor:
        q, k, v = self._spread(query), self._spread(key), self._spread(value)
        self._keep(layer, k, v)
        plain = query.device.type == "cpu" and self.longest <= _PLAIN_LENGTH
        out = (self._plain if plain else self._fused)(q, k, v, scaling, window)
        packed = out.transpose(1, 2).reshape(self.sequences * self.longest, *out.shape[1::2])
        return (packed if self.even else packed.index_select(0, self.slot_T))[None]

    def _keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        """For layouts that store keys and values [S, Hkv, L, D]."""

    def _spread(self, x: Tensor) -> Tensor:
        """[1, H, T, D] -> [S, H, L, D]."""
        x_T = x[0].transpose(0, 1)
        if not self.even:
            x_T = x_T.new_zeros(self.sequences * self.longest, *x_T.shape[1:]).index_copy_(0, self.slot_T, x_T)
        return x_T.reshape(self.sequences, self.longest, *x_T.shape[1:]).transpose(1, 2)

    def _out_of_sight(self, window: int | None, device: torch.device) -> Tensor:
        """[L, L] bool: true where the key (second index) is later than the query, or before its window."""
        if window not in self._hidden:
            place_L = torch.arange(self.longest, device=device)
            behind = place_L[:, None] - place_L[None]
            hidden = behind < 0
            self._hidden[window] = hidden if window is None else hidden | (behind >= window)
        return self._hidden[window]

    def _plain(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        """Products and a softmax; the queries that share a key head form one matrix, so no key is repeated."""
        sequences, heads, length, size = q.shape
        batch, rows = sequences * k.shape[1], heads // k.shape[1] * length
        k_t = k.reshape(batch, length, size).transpose(1, 2)
        scores = torch.bmm((q * scaling).reshape(batch, rows, size), k_t).view(-1, length, length)
        scores = scores.masked_fill_(self._out_of_sight(window, q.device), float("-inf"))
        share = torch.softmax(scores, -1).view(batch, rows, length)
        return torch.bmm(share, v.reshape(batch, length, -1)).view(sequences, heads, length, -1)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, scaling: float, window: int | None) -> Tensor:
        grouped = q.shape[1] != k.shape[1]
        if window is None or window >= self.longest:
            return scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=grouped)
        seen = ~self._out_of_sight(window, q.device)
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=scaling, enable_gqa=grouped)


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


class Prefill(Packed):
    """Whole prompts, whose keys and values also go into rows [first, first + len(owner)) of the cache.

    `owner` [rows]: the prompt, as an index into `lengths`, that each row continues.
    """

    def __init__(
        self, lengths: Sequence[int], cache: KeyValues, *, first: int, owner: Tensor, device: torch.device | str
    ) -> None:
        super().__init__(lengths, device)
        self._cache, self._rows, self._owner = cache, slice(first, first + len(owner)), owner.to(device)

    def _keep(self, layer: int, key: Tensor, value: Tensor) -> None:
        for buffer, x in zip(self._cache.layer(layer, key, value), (key, value), strict=True):
            buffer[self._rows, :, : self.longest] = x.index_select(0, self._owner)


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


def _attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    layout: Layout | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls in each layer. Raises InputError for what it cannot do."""
    extras = {
        "soft-capped attention scores": softcap is not None,
        "attention sinks": s_aux is not None,
        "dropout": dropout > 0,
        "an attention mask": attention_mask is not None,
        "attention that is not causal": not getattr(module, "is_causal", True),
    }
    asked = [name for name, present in extras.items() if present]
    if asked:
        raise InputError(
            f"{type(module).__name__} asks for {', '.join(asked)}, which the packed attention does not have: use another model"
        )
    if layout is None:
        raise ValueError(f"{type(module).__name__}: a model with attention {ATTENTION!r} is called with layout=...")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return layout.attend(module.layer_idx, query, key, value, scaling=scale, window=sliding_window), None


# No mask function goes with it: transformers then makes no mask, which in a packed row would be [T, T].
AttentionInterface.register(ATTENTION, _attention)
