"""Sums and means over the rows of a packed batch, and back.

In: a number per trained token and the row that each token belongs to. Out: a number per row, or a
row's number copied to its tokens. `advantages.py` and `losses.py` call it; nothing else sums over rows.

Only trained tokens are packed, so there is no padding and no mask, and a non-finite value stays in its
own row. Sums are made in float64 by `index_put(accumulate=True)`, forward and backward: that kernel adds
in a fixed order on CUDA (where `index_add` does not) and, in float64, on the CPU (where in float32 it does not).

Suffixes: _N trained tokens (packed, any order), _S sequences (rows).
"""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """float32 at least: bfloat16 cannot resolve GSPO's band of 3e-4. float64 stays as it is."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def segment_sum(x_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Sum of each row's tokens, [sequences]; 0 for a row without tokens. Differentiable and deterministic."""
    zeros_S = torch.zeros(sequences, dtype=torch.float64, device=x_N.device)
    sum_S = zeros_S.index_put((sequence_N.long(),), x_N.double(), accumulate=True)
    return sum_S.to(widened(x_N).dtype)


def segment_mean(x_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    """Mean over each row's tokens, [sequences]; 0 for a row without tokens. Differentiable and deterministic."""
    length_S = segment_sum(torch.ones_like(x_N, dtype=torch.float64), sequence_N, sequences)
    mean_S = segment_sum(x_N.double(), sequence_N, sequences) / length_S.clamp(min=1)
    return mean_S.to(widened(x_N).dtype)


def spread(x_S: Tensor, sequence_N: Tensor) -> Tensor:
    """Each row's number copied to its tokens, [N]; its gradient is the deterministic sum over the row."""
    return x_S.double()[sequence_N.long()].to(widened(x_S).dtype)
