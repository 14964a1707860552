"""Linear layers whose weight gradient is multiplied in the order that the processor is fast at, or straight to where it adds up.

In: a model in bfloat16 on a CPU. Out: the same model with the same sums. `load` installs it; `heads`, `fused` and
`layers` use the product.

Letters: T tokens of the packed row, M and N widths.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

ALL = slice(None)


class Collect(Protocol):
    """Takes the gradient of some rows of one weight, in the place of autograd; see `masters`."""

    def __call__(self, by_output_TM: Tensor, inputs_TN: Tensor, rows: slice = ALL) -> None: ...


def collector(module: nn.Module) -> Collect | None:
    """What takes the gradient of this layer's weight, if it is not autograd."""
    return getattr(module, "collect", None)


def weight_gradient(by_output_TM: Tensor, inputs_TN: Tensor, collect: Collect | None) -> Tensor | None:
    """[M, N] for autograd; None if `collect` has taken it."""
    if collect is None:
        return transposed_product(by_output_TM, inputs_TN)
    collect(by_output_TM, inputs_TN)
    return None


def transposed_product(a_TM: Tensor, b_TN: Tensor) -> Tensor:
    """[M, N] the transpose of `a_TM` times `b_TN`.

    oneDNN multiplies bfloat16 matrices at less than half its rate if the left one lies transposed: writing it down
    anew first costs less.
    """
    a_MT = a_TM.T.contiguous() if _native(a_TM) else a_TM.T
    return torch.mm(a_MT, b_TN)


def _native(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype == torch.bfloat16


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, collect: Collect | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.collect = collect
        return linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, by_weight = grad.reshape(-1, grad.shape[-1]), None
        by_x = torch.mm(rows, weight).view_as(x) if ctx.needs_input_grad[0] else None
        if ctx.needs_input_grad[1]:
            by_weight = weight_gradient(rows, x.reshape(-1, x.shape[-1]), ctx.collect)
        return by_x, by_weight, None


def install(model: nn.Module) -> None:
    """Let every plain linear layer without bias take its gradient so, wherever it computes in bfloat16 on a CPU."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.forward = partial(_forward, module)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    # Not where no weight gradient is wanted, as under an adapter: the product keeps its input for that.
    if not torch.is_grad_enabled() or not _native(x) or not module.weight.requires_grad:
        return linear(x, module.weight, module.bias)
    result: Tensor = _Linear.apply(x, module.weight, collector(module))  # type: ignore[no-untyped-call]
    return result
