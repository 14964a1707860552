"""The attention of a packed row of trees as one FlexAttention kernel, for CUDA in half precision. Not run on a GPU yet.

In: the same segments and parents as `attention.Packed`, which calls it. Out: the same numbers.

Letters: T tokens of the packed row, H heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention


class FlexTrees:
    """A packed row of trees, as masks of FlexAttention: one for each window that the model's layers have."""

    def __init__(self, lengths: Sequence[int], parents: Sequence[int | None], device: torch.device) -> None:
        count = len(lengths)
        above = torch.zeros(count, count, dtype=torch.bool)
        """[segment, segment] true where the second is the first or stands above it."""
        depth = [0] * count
        for i, parent in enumerate(parents):
            if parent is not None:
                above[i] = above[parent]
                depth[i] = depth[parent] + lengths[parent]
            above[i, i] = True
        length = torch.tensor(lengths)
        self._tokens = int(length.sum())
        self._segment_T = torch.repeat_interleave(torch.arange(count), length).to(device)
        start_T = torch.repeat_interleave(length.cumsum(0) - length - torch.tensor(depth), length)
        self._position_T = (torch.arange(self._tokens) - start_T).to(device)
        self._above = above.to(device)
        self._masks: dict[int | None, BlockMask] = {}

    def attend(self, query: Tensor, key: Tensor, value: Tensor, *, scaling: float, window: int | None) -> Tensor:
        """query [1, H, T, D], key and value [1, Hkv, T, D] -> [1, T, H, D]."""
        if window not in self._masks:
            self._masks[window] = create_block_mask(
                self._sees(window), None, None, self._tokens, self._tokens, device=str(query.device)
            )
        kernel = _kernel(query.device.type)
        out: Tensor = kernel(
            query, key, value, block_mask=self._masks[window], scale=scaling, enable_gqa=query.shape[1] != key.shape[1]
        )
        return out.transpose(1, 2)

    def _sees(self, window: int | None) -> Callable[..., Tensor]:
        segment_T, position_T, above = self._segment_T, self._position_T, self._above

        def sees(_batch: Tensor, _head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            # Segments stand after those that they continue, so that earlier in the row is earlier in the sequence.
            seen = above[segment_T[q], segment_T[k]] & (k <= q)
            return seen if window is None else seen & (position_T[q] - position_T[k] < window)

        return sees


@cache
def _kernel(device_type: str) -> Any:
    """Compiled where there is a kernel; elsewhere torch's own slow reference, which has no backward pass."""
    return torch.compile(flex_attention, dynamic=True) if device_type == "cuda" else flex_attention
