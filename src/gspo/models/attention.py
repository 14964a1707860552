"""Attention over one packed row: a layout says which tokens see which, and the model only hands over q, k, v.

In: a transformers model whose attention is set to `ATTENTION`, called with `layout=`. Out: attention output
without padding outside this file. `heads` passes layouts through; the learner makes `Packed`, the engine those of `cache`.

Letters: T tokens of the packed row, S sequences, L longest sequence, H heads, D head size.
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
        plain = query.device.type == "cpu" and self.longest <= _PLAIN_LENGTH
        out = (self._plain if plain else self._fused)(q, k, v, scaling, window)
        packed = out.transpose(1, 2).reshape(self.sequences * self.longest, *out.shape[1::2])
        return (packed if self.even else packed.index_select(0, self.slot_T))[None]

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
