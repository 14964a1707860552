"""Norms and gated activations with a written-out backward pass: less is kept for it, and torch.compile can fuse each.

In: a loaded model. Out: the same model, its RMS norms and SwiGLU layers computed by the functions below wherever they
are known to mean the same; `load` holds the result against the model's own. Works on any device.

Letters: T tokens of the packed row, D width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gspo.models.linear import Collect, collector, weight_gradient

# ------------------------------------------------------------------------------ the formulas


def norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """x / rms(x) * weight, the first factor rounded to the type of x as transformers does it; and 1 / rms [T, 1]."""
    wide = _widened(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon)
    return (wide * scale).to(x.dtype) * weight, scale


def norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """With n = x scale:  d x = scale (g w - n mean(g w n)),  d weight = sum over tokens of g n."""
    n, g = _widened(x) * scale, _widened(grad)
    gw = g * weight
    grad_x = scale * (gw - n * (gw * n).mean(-1, keepdim=True))
    return grad_x.to(x.dtype), (g * n).flatten(0, -2).sum(0).to(weight.dtype)


def _gate(gate: Tensor, up: Tensor) -> Tensor:
    return silu(gate) * up


def _gate_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """With s = sigmoid(a):  d silu(a) / d a = s (1 + a (1 - s))."""
    return torch.ops.aten.silu_backward(grad * up, gate), grad * silu(gate)


def _widened(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@dataclass(frozen=True)
class Kernels:
    """The four formulas, as they are or compiled."""

    norm: Callable[..., tuple[Tensor, Tensor]] = norm
    norm_backward: Callable[..., tuple[Tensor, Tensor]] = norm_backward
    gate: Callable[..., Tensor] = _gate
    gate_backward: Callable[..., tuple[Tensor, Tensor]] = _gate_backward


fuse: Any = partial(torch.compile, dynamic=True, fullgraph=True, recompile_limit=64)
"""Compile a formula, when it is first called. There is a version for each rank and each set of arguments that want
gradients; policy, reference and critic share them, and need more than the 8 that torch allows."""


def compiled() -> Kernels:
    """Each formula as one pass over memory: C++ on a CPU, Triton on a GPU; made when it is first called."""
    return Kernels(fuse(norm), fuse(norm_backward), fuse(_gate), fuse(_gate_backward))


# ------------------------------------------------------------------------------ in the place of the model's own


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float, kernels: Kernels) -> Tensor:
        y, scale = kernels.norm(x, weight, epsilon)
        ctx.save_for_backward(x, weight, scale)
        ctx.kernels = kernels
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad_x, grad_weight = ctx.kernels.norm_backward(grad, x, weight, scale)
        return grad_x, grad_weight if ctx.needs_input_grad[1] else None, None, None


class _Gated(torch.autograd.Function):
    """silu(gate) up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, kernels: Kernels) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.kernels = kernels
        return kernels.gate(gate, up)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up = ctx.saved_tensors
        return *ctx.kernels.gate_backward(grad.clone(), gate, up), None  # a copy, since kernels may write into it


class _GatedDown(torch.autograd.Function):
    """down(silu(gate) up): the gated values are made again in the backward pass, which costs less than keeping them."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, down: Tensor, kernels: Kernels, collect: Collect | None) -> Tensor:
        ctx.save_for_backward(gate, up, down)
        ctx.kernels, ctx.collect = kernels, collect
        return linear(kernels.gate(gate, up), down)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gate, up, down = ctx.saved_tensors
        rows, by_down = grad.reshape(-1, grad.shape[-1]), None
        if ctx.needs_input_grad[2]:
            by_down = weight_gradient(rows, ctx.kernels.gate(gate, up).reshape(-1, gate.shape[-1]), ctx.collect)
        by_gated = torch.mm(rows, down).view_as(gate)
        return *ctx.kernels.gate_backward(by_gated, gate, up), by_down, None, None


def install(model: nn.Module, kernels: Kernels) -> None:
    """Put the formulas in the place of the modules that compute them.

    A norm is known by its class's name and its `variance_epsilon`, a gated layer by its three projections and SiLU.
    Others stay as they are.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm") and hasattr(module, "variance_epsilon"):
            module.forward = partial(_norm_forward, module, kernels)
        elif _is_gated(module):
            module.forward = partial(_gated_forward, module, kernels)


def _is_gated(module: nn.Module) -> bool:
    projections = (getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj"))
    activation = getattr(module, "act_fn", None)
    silu_like = isinstance(activation, nn.SiLU) or type(activation).__name__ == "SiLUActivation"
    plain = (getattr(p, "base_layer", p) for p in projections)  # under an adapter, if there is one
    return silu_like and all(isinstance(p, nn.Linear) for p in plain)


def _norm_forward(module: Any, kernels: Kernels, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():  # a Function costs as much as the formula for the few rows of a decoding step
        return kernels.norm(x, module.weight, module.variance_epsilon)[0]
    result: Tensor = _Norm.apply(x, module.weight, module.variance_epsilon, kernels)  # type: ignore[no-untyped-call]
    return result


def _gated_forward(module: Any, kernels: Kernels, x: Tensor) -> Tensor:
    gate, up, down = module.gate_proj(x), module.up_proj(x), module.down_proj
    result: Tensor
    if not torch.is_grad_enabled():  # a Function costs as much as the formula for the few rows of a decoding step
        result = down(kernels.gate(gate, up))
    elif type(down) is nn.Linear and down.bias is None:
        result = _GatedDown.apply(gate, up, down.weight, kernels, collector(down))
    else:  # an adapter, say
        result = down(_Gated.apply(gate, up, kernels))  # type: ignore[no-untyped-call]
    return result
