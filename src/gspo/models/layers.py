"""Decoder layers of Llama's kind as two functions with a written-out backward pass: less is kept, fewer passes are made.

In: a loaded model. Out: the same model, whose layers compute a packed row of the trainer by the functions below wherever
their code is Llama's; `load` holds the result against the model's own. Whatever else goes through them (the engine's
layouts, a padded batch) is computed by the modules themselves, and layers of other kinds stay as they are.

Letters: T tokens of the packed row, W width, F inner width, H query heads, K key heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from gspo.models import fused
from gspo.models.attention import Packed, attention
from gspo.models.linear import Collect, collector, weight_gradient
from gspo.models.llamas import is_llamas_layer, linears, plain

# ------------------------------------------------------------------------------ the formulas


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D] rotary positions: (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of a head."""
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (y.chunk(2, -1) for y in (x, cos[:, None], sin[:, None]))
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], -1)


def _turned_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (y.chunk(2, -1) for y in (grad, cos[:, None], sin[:, None]))
    return torch.cat([a * cos_a + b * sin_b, b * cos_b - a * sin_a], -1)


def _part(rows: Tensor, cos: Tensor, sin: Tensor, key_heads: int, scaling: float) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + K + K) D] -> queries [T, H, D], scaled, keys and values [T, K, D]; cos and sin [T, D]."""
    x = rows.view(len(rows), -1, cos.shape[-1])
    q, k, v = torch.split(x, [x.shape[1] - 2 * key_heads, key_heads, key_heads], 1)
    return _turned(q, cos, sin) * scaling, _turned(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def _part_backward(grads: tuple[Tensor, Tensor, Tensor], cos: Tensor, sin: Tensor, scaling: float) -> Tensor:
    grad_q, grad_k, grad_v = grads
    return torch.cat([_turned_back(grad_q * scaling, cos, sin), _turned_back(grad_k, cos, sin), grad_v], 1).flatten(1)


def _regate(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of silu(gate) up: itself, and its gradients."""
    opened = silu(gate)
    return opened * up, torch.ops.aten.silu_backward(grad * up, gate), grad * opened


def _norm_of_sum(x: Tensor, delta: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor, Tensor]:
    """x + delta, its norm, and 1 / rms."""
    total = x + delta
    return total, *fused.norm(total, weight, epsilon)


def _norm_backward(grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x, which also went on `beside` the norm, and of the weight."""
    grad_x, grad_weight = fused.norm_backward(grad, x, weight, scale)
    return grad_x + beside, grad_weight


@dataclass(frozen=True)
class Kernels:
    """The formulas, as they are or compiled."""

    part: Callable[..., tuple[Tensor, Tensor, Tensor]] = _part
    part_backward: Callable[..., Tensor] = _part_backward
    regate: Callable[..., tuple[Tensor, Tensor, Tensor]] = _regate
    norm_of_sum: Callable[..., tuple[Tensor, Tensor, Tensor]] = _norm_of_sum
    norm_backward: Callable[..., tuple[Tensor, Tensor]] = _norm_backward
    fused: fused.Kernels = field(default_factory=fused.Kernels)


def compiled(others: fused.Kernels) -> Kernels:
    """Each formula as one pass over memory; made when it is first called."""
    formulas = (_part, _part_backward, _regate, _norm_of_sum, _norm_backward)
    return Kernels(**{formula.__name__.strip("_"): fused.fuse(formula) for formula in formulas}, fused=others)


# ------------------------------------------------------------------------------ with gradients


@dataclass(frozen=True)
class _How:
    """What the two functions take beside tensors."""

    epsilon: float
    kernels: Kernels
    scaling: float
    collects: tuple[Collect | None, ...]
    """Of each weight but the norm's."""

    def norm(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.fused.norm(x, weight, self.epsilon)


class _Projected(torch.autograd.Function):
    """The input itself; scaled queries, keys and values of the normed input, in one product. The normed input is made again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, how: _How, *weights: Tensor) -> tuple[Tensor, ...]:
        norm, *each = weights
        ctx.how = how
        normed, scale = how.norm(x, norm)
        ctx.save_for_backward(x, cos, sin, scale, *weights)
        rows, key_heads = linear(normed, torch.cat(each)), len(each[1]) // cos.shape[-1]
        return x, *how.kernels.part(rows, cos, sin, key_heads, how.scaling)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, beside: Tensor, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, cos, sin, scale, norm, *each = ctx.saved_tensors
        kernels: Kernels = ctx.how.kernels
        grad = kernels.part_backward(tuple(g.contiguous() for g in grads), cos, sin, ctx.how.scaling)
        by_normed = torch.mm(grad, torch.cat(each))
        weigh = _WeightGradients(ctx.needs_input_grad[5:], ctx.how.collects)
        normed = ctx.how.norm(x, norm)[0] if any(weigh.trained) else x
        by_each = [weigh(i, part, normed) for i, part in enumerate(torch.split(grad, [len(w) for w in each], 1))]
        by_x, by_norm = kernels.norm_backward(by_normed, x, norm, scale, beside)
        return by_x, None, None, None, by_norm, *by_each


class _Finished(torch.autograd.Function):
    """The layer from its attention on: m = x + attended O,  m + down(silu(gate n(m)) up n(m))."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, attended: Tensor, how: _How, *weights: Tensor) -> Tensor:
        norm, out, gate, up, down = weights
        ctx.how = how
        middle, normed, scale = how.kernels.norm_of_sum(x, linear(attended, out), norm, how.epsilon)
        gated, upped = linear(normed, gate), linear(normed, up)
        ctx.save_for_backward(attended, middle, scale, gated, upped, *weights)
        return linear(how.kernels.fused.gate(gated, upped), down).add_(middle)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, middle, scale, gated, upped, norm, out, gate, up, down = ctx.saved_tensors
        kernels: Kernels = ctx.how.kernels
        weigh = _WeightGradients(ctx.needs_input_grad[4:], ctx.how.collects)
        inner, by_gated, by_upped = kernels.regate(torch.mm(grad, down), gated, upped)
        by_down = weigh(3, grad, inner)
        del inner
        normed = ctx.how.norm(middle, norm)[0]
        by_gate, by_up = weigh(1, by_gated, normed), weigh(2, by_upped, normed)
        by_normed = torch.addmm(torch.mm(by_gated, gate), by_upped, up)
        by_middle, by_norm = kernels.norm_backward(by_normed, middle, norm, scale, grad)
        by_out = weigh(0, by_middle, attended)
        return by_middle, torch.mm(by_middle, out), None, by_norm, by_out, by_gate, by_up, by_down


@dataclass(frozen=True)
class _WeightGradients:
    """[outputs, inputs] of those weights that are trained and whose gradient nothing else takes."""

    trained: tuple[bool, ...]
    collects: tuple[Collect | None, ...]

    def __call__(self, place: int, by_output: Tensor, inputs: Tensor) -> Tensor | None:
        return weight_gradient(by_output, inputs, self.collects[place]) if self.trained[place] else None


# ------------------------------------------------------------------------------ in the place of the model's own


def install(model: nn.Module, kernels: Kernels) -> None:
    """Put the functions in the place of every decoder layer whose code is Llama's, without biases."""
    for module in model.modules():
        if is_llamas_layer(module):
            module.forward = partial(_forward, module, kernels)


def _forward(
    layer: Any,
    kernels: Kernels,
    hidden_states: Tensor,
    attention_mask: Tensor | None = None,
    *,
    position_embeddings: tuple[Tensor, Tensor],
    **kwargs: Any,
) -> Tensor:
    attn, cos = layer.self_attn, position_embeddings[0]
    # Not for a layer that has been changed (by an adapter, say), nor where a part of a head is turned.
    if not (isinstance(kwargs.get("layout"), Packed) and plain(layer) and cos.shape[-1] == attn.head_dim):
        own: Tensor = type(layer).forward(
            layer, hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
        )
        return own
    first, second = layer.input_layernorm, layer.post_attention_layernorm
    q, k, v, *others = (part.weight for part in linears(layer))
    collects = tuple(collector(part) for part in linears(layer))
    how = _How(first.variance_epsilon, kernels, attn.scaling, collects[:3])
    turns = [y[0] for y in position_embeddings]
    parts: Any = _Projected.apply(hidden_states[0], *turns, how, first.weight, q, k, v)  # type: ignore[no-untyped-call]
    q, k, v = (part.transpose(0, 1)[None] for part in parts[1:])
    attended = attention(attn, q, k, v, attention_mask, scaling=1.0, **kwargs)[0][0].flatten(1)
    how = _How(second.variance_epsilon, kernels, 1.0, collects[3:])
    result: Tensor = _Finished.apply(parts[0], attended, how, second.weight, *others)  # type: ignore[no-untyped-call]
    return result[None]
