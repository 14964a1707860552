"""Weights in, the same weights at a lower precision out: the values that an engine which stores them so multiplies with.

The local engine calls `rounded` on every tensor that it is given. Only the values are those of the lower precision: they
are kept, and computed with, in the dtype that they came in. Activations and cached keys and values are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

_E4M3_MAX = 448.0


def _bf16(w: Tensor) -> Tensor:
    return w.to(torch.bfloat16).to(w.dtype)


def _fp8_cast(w: Tensor) -> Tensor:
    """Each entry to the nearest float8_e4m3fn: 3 bits of fraction from 2^-6 up, steps of 2^-9 below, at most 448."""
    return w.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn).to(w.dtype)


def _fp8(w: Tensor) -> Tensor:
    """`_fp8_cast` of each row, scaled so that its largest entry is 448."""
    scale = _row_scale(w, _E4M3_MAX)
    return _fp8_cast(w / scale) * scale


def _int(bits: int) -> Callable[[Tensor], Tensor]:
    """Symmetric whole numbers up to 2^(bits - 1) - 1, of which the largest entry of a row is one."""
    largest = 2 ** (bits - 1) - 1

    def round_to(w: Tensor) -> Tensor:
        scale = _row_scale(w, largest)
        return (w / scale).round().clamp(-largest, largest) * scale

    return round_to


def _row_scale(w: Tensor, largest: float) -> Tensor:
    """What the entries of a row (all but the last axis) are divided by, so that the largest of them is `largest`."""
    return w.abs().amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny) / largest


_KINDS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "bf16": (_bf16, 0),
    "fp8": (_fp8, 2),
    "fp8_cast": (_fp8_cast, 2),
    "int8": (_int(8), 2),
    "int6": (_int(6), 2),
}
"""The rounding, and the fewest dimensions of a tensor that it is applied to."""


@torch.no_grad()
def rounded(w: Tensor, kind: str) -> Tensor:
    """`w` at the precision `kind`, as a new tensor of the same shape and dtype.

    bf16: every tensor, to the nearest bfloat16. The others leave vectors (norms, biases) as they are and round every
    matrix: embedding, head, router and experts (`[E, rows, columns]`) among them. fp8: float8_e4m3fn with one scale a
    row, as engines do that scale by output channel. fp8_cast: float8_e4m3fn of each entry as it is, without any scale,
    so that entries under 2^-6 have fewer bits and entries over 448 are cut to it. int8, int6: symmetric whole numbers
    with one scale a row. Ties go to even. A row is all but the last axis: an output channel of a linear layer.
    """
    rounding, dimensions = _KINDS[kind]
    if w.ndim < dimensions:
        return w.clone()
    # In float32 or better; on a CPU where the device has no 8-bit floats, as Apple's GPUs.
    wide = w.to(dtype=torch.promote_types(w.dtype, torch.float32), device="cpu" if w.device.type == "mps" else None)
    return rounding(wide).to(dtype=w.dtype, device=w.device)
