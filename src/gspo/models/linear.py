"""Linear layers whose weight gradient is multiplied in the order that the processor is fast at.

In: a model in bfloat16 on a CPU. Out: the same model with the same sums. `load` installs it; `heads` uses the product.

Letters: T tokens of the packed row, M and N widths.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear


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
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return linear(x, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        by_x = torch.mm(rows, weight).view_as(x) if ctx.needs_input_grad[0] else None
        return by_x, transposed_product(rows, x.reshape(-1, x.shape[-1])) if ctx.needs_input_grad[1] else None


def install(model: nn.Module) -> None:
    """Let every plain linear layer without bias take its gradient so, wherever it computes in bfloat16 on a CPU."""
    for module in model.modules():
        if type(module) is nn.Linear and module.bias is None:
            module.forward = partial(_forward, module)


def _forward(module: nn.Linear, x: Tensor) -> Tensor:
    # Not where no weight gradient is wanted, as under an adapter: the product keeps its input for that.
    if not torch.is_grad_enabled() or not _native(x) or not module.weight.requires_grad:
        return linear(x, module.weight, module.bias)
    result: Tensor = _Linear.apply(x, module.weight)  # type: ignore[no-untyped-call]
    return result
