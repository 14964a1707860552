"""The elementwise formulas of a model by the kernels, where those suit; where they do not, as torch has them.

In: kernels. Out: what `fused`, `layers` and `heads` compute by. `install` asks for them, on processors that have the
kernels; on others torch.compile makes its own.

Letters: T tokens of the packed row, D width, N rows of logits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.models import fused, heads, layers
from gspo.models.native import Kernels

_FUSED, _LAYERS, _HEADS = fused.Kernels(), layers.Kernels(), heads.Formulas()


@dataclass(frozen=True)
class Native:
    """Methods with the names and arguments of the formulas that they stand for."""

    kernels: Kernels

    def norm(self, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        return (
            self.kernels.norm_of_sum(x, None, weight, epsilon)[1:]
            if self.kernels.suits(x, weight)
            else _FUSED.norm(x, weight, epsilon)
        )

    def norm_of_sum(self, x: Tensor, delta: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
        suited = self.kernels.suits(x, delta, weight)
        return (self.kernels if suited else _LAYERS).norm_of_sum(x, delta, weight, epsilon)

    def norm_backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernels.suits(grad, x, weight):
            return self.kernels.norm_backward(grad, x, weight, scale, None)
        return _FUSED.norm_backward(grad, x, weight, scale)

    def norm_backward_beside(
        self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, beside: Tensor
    ) -> tuple[Tensor, Tensor]:
        suited = self.kernels.suits(grad, x, weight, beside)
        return (self.kernels if suited else _LAYERS).norm_backward(grad, x, weight, scale, beside)

    def gate(self, gate: Tensor, up: Tensor) -> Tensor:
        return self.kernels.gated(gate, up) if self.kernels.suits(gate, up) else _FUSED.gate(gate, up)

    def gate_backward(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        if self.kernels.suits(grad, gate, up):
            return self.kernels.regate(grad, gate, up)[1:]
        return _FUSED.gate_backward(grad, gate, up)

    def regate(self, grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (self.kernels if self.kernels.suits(grad, gate, up) else _LAYERS).regate(grad, gate, up)

    def part(
        self, rows: Tensor, cos: Tensor, sin: Tensor, key_heads: int, scaling: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        return (self.kernels if self.kernels.turns(rows, cos, sin) else _LAYERS).part(
            rows, cos, sin, key_heads, scaling
        )

    def part_backward(self, grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, scaling: float) -> Tensor:
        suited = self.kernels.suits(*grads) and self.kernels.turns(grads[0], cos, sin)
        return (self.kernels if suited else _LAYERS).part_backward(grads, cos, sin, scaling)

    def absorb(self, z: Tensor, m_N: Tensor, s_N: Tensor, d_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return (self.kernels if self.kernels.absorbs(z) else _HEADS).absorb(z, m_N, s_N, d_N)

    def gradient(self, z: Tensor, *rows: Tensor | None, dtype: torch.dtype) -> Tensor:
        even = all(x is None or (x.dtype == torch.float32 and x.is_contiguous()) for x in rows)
        suited = even and self.kernels.absorbs(z) and dtype == torch.bfloat16
        return self.kernels.slope(z, *rows) if suited else _HEADS.gradient(z, *rows, dtype=dtype)


def of_modules(kernels: Kernels) -> fused.Kernels:
    native = Native(kernels)
    return fused.Kernels(native.norm, native.norm_backward, native.gate, native.gate_backward)


def of_layers(kernels: Kernels) -> layers.Kernels:
    native = Native(kernels)
    return layers.Kernels(
        part=native.part,
        part_backward=native.part_backward,
        regate=native.regate,
        norm_of_sum=native.norm_of_sum,
        norm_backward=native.norm_backward_beside,
        fused=of_modules(kernels),
    )


def of_head(kernels: Kernels) -> heads.Formulas:
    native = Native(kernels)
    return heads.Formulas(native.absorb, native.gradient)
