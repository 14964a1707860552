"""Decoder layers of Llama's kind as two functions with a written-out backward pass: less is kept, fewer passes are made.

In: a loaded model. Out: the same model, whose layers compute a packed row of the trainer by the functions below wherever
their code is Llama's; `load` holds the result against the model's own. Whatever else goes through them (the engine's
layouts, a padded batch) is computed by the modules themselves, and layers of other kinds stay as they are.

Letters: T tokens of the packed row, W width, F inner width, H query heads, K key heads, D head size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu
from transformers.models.llama import modeling_llama as llama

from gspo.models import fused
from gspo.models.attention import Packed, attention
from gspo.models.linear import transposed_product

# ------------------------------------------------------------------------------ the formulas


def _turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, H, D] rotary positions: (a, b) -> (a cos - b sin, b cos + a sin), where a and b are the halves of a head."""
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (y.chunk(2, -1) for y in (x, cos[:, None], sin[:, None]))
    return torch.cat([a * cos_a - b * sin_a, b * cos_b + a * sin_b], -1)


def _turned_back(grad: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    (a, b), (cos_a, cos_b), (sin_a, sin_b) = (y.chunk(2, -1) for y in (grad, cos[:, None], sin[:, None]))
    return torch.cat([a * cos_a + b * sin_b, b * cos_b - a * sin_a], -1)


def _part(rows: Tensor, cos: Tensor, sin: Tensor, key_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """[T, (H + K + K) D] -> queries [T, H, D], keys and values [T, K, D]; cos and sin [T, D]."""
    x = rows.view(len(rows), -1, cos.shape[-1])
    q, k, v = x.split([x.shape[1] - 2 * key_heads, key_heads, key_heads], 1)
    return _turned(q, cos, sin), _turned(k, cos, sin), v.clone(memory_format=torch.contiguous_format)


def _part_backward(grad_q: Tensor, grad_k: Tensor, grad_v: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([_turned_back(grad_q, cos, sin), _turned_back(grad_k, cos, sin), grad_v], 1).flatten(1)


def _regate(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of silu(gate) up: itself, and its gradients."""
    opened = silu(gate)
    return opened * up, torch.ops.aten.silu_backward(grad * up, gate), grad * opened


@dataclass(frozen=True)
class Kernels:
    """The formulas, as they are or compiled."""

    part: Callable[..., tuple[Tensor, Tensor, Tensor]] = _part
    part_backward: Callable[..., Tensor] = _part_backward
    regate: Callable[..., tuple[Tensor, Tensor, Tensor]] = _regate
    fused: fused.Kernels = field(default_factory=fused.Kernels)


def compiled(others: fused.Kernels) -> Kernels:
    """Each formula as one pass over memory; made when it is first called."""
    fuse: Any = partial(torch.compile, dynamic=True, fullgraph=True)
    return Kernels(fuse(_part), fuse(_part_backward), fuse(_regate), others)


# ------------------------------------------------------------------------------ with gradients


@dataclass(frozen=True)
class _Norm:
    epsilon: float
    kernels: fused.Kernels

    def __call__(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.norm(x, weight, self.epsilon)

    def backward(self, grad: Tensor, x: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        return self.kernels.norm_backward(grad, x, weight, scale)


class _Projected(torch.autograd.Function):
    """Queries, keys and values of the normed input, in one product. The normed input is made again, not kept."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, norm_weight: Tensor, cos: Tensor, sin: Tensor, how: tuple[_Norm, Kernels], *each: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        norm, kernels = ctx.how = how
        normed, scale = norm(x, norm_weight)
        ctx.save_for_backward(x, norm_weight, scale, cos, sin, *each)
        return kernels.part(linear(normed, torch.cat(each)), cos, sin, len(each[1]) // cos.shape[-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, norm_weight, scale, cos, sin, *each = ctx.saved_tensors
        norm, kernels = ctx.how
        grad = kernels.part_backward(*(g.contiguous() for g in grads), cos, sin)
        by_normed = torch.mm(grad, torch.cat(each))
        by_each: tuple[Tensor | None, ...] = (None,) * len(each)
        if any(ctx.needs_input_grad[5:]):
            by_each = transposed_product(grad, norm(x, norm_weight)[0]).split([len(w) for w in each])
        by_x, by_norm = norm.backward(by_normed, x, norm_weight, scale)
        return by_x, by_norm, None, None, None, *by_each


class _Finished(torch.autograd.Function):
    """The layer from its attention on: m = x + attended O,  m + down(silu(gate n(m)) up n(m))."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, attended: Tensor, norm_weight: Tensor, how: tuple[_Norm, Kernels], *each: Tensor
    ) -> Tensor:
        norm, kernels = ctx.how = how
        out, gate, up, down = each
        middle = linear(attended, out).add_(x)
        normed, scale = norm(middle, norm_weight)
        gated, upped = linear(normed, gate), linear(normed, up)
        ctx.save_for_backward(attended, middle, norm_weight, scale, gated, upped, *each)
        return linear(kernels.fused.gate(gated, upped), down).add_(middle)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        attended, middle, norm_weight, scale, gated, upped, out, gate, up, down = ctx.saved_tensors
        norm, kernels = ctx.how
        inner, by_gated, by_upped = kernels.regate(torch.mm(grad, down), gated, upped)
        weigh = _WeightGradients(ctx.needs_input_grad[4:])
        by_down = weigh(3, grad, inner)
        del inner
        normed = norm(middle, norm_weight)[0]
        by_gate, by_up = weigh(1, by_gated, normed), weigh(2, by_upped, normed)
        by_normed = torch.addmm(torch.mm(by_gated, gate), by_upped, up)
        by_middle, by_norm = norm.backward(by_normed, middle, norm_weight, scale)
        by_middle.add_(grad)
        by_out = weigh(0, by_middle, attended)
        return by_middle, torch.mm(by_middle, out), by_norm, None, by_out, by_gate, by_up, by_down


@dataclass(frozen=True)
class _WeightGradients:
    """[outputs, inputs] of those weights that are trained."""

    trained: tuple[bool, ...]

    def __call__(self, place: int, by_output: Tensor, inputs: Tensor) -> Tensor | None:
        return transposed_product(by_output, inputs) if self.trained[place] else None


# ------------------------------------------------------------------------------ in the place of the model's own


def install(model: nn.Module, kernels: Kernels) -> None:
    """Put the functions in the place of every decoder layer whose code is Llama's, without biases."""
    for module in model.modules():
        if _is_llamas(module):
            module.forward = partial(_forward, module, kernels)


_PARTS = {
    "self_attn": llama.LlamaAttention,
    "mlp": llama.LlamaMLP,
    "input_layernorm": llama.LlamaRMSNorm,
    "post_attention_layernorm": llama.LlamaRMSNorm,
}


def _is_llamas(module: Any) -> bool:
    """Whether the layer, its parts and the rotation of positions have the very code of Llama's, and its weights are plain."""
    own = inspect.getmodule(type(module))
    return (
        _same(type(module), llama.LlamaDecoderLayer)
        and all(_same(type(getattr(module, name, None)), theirs) for name, theirs in _PARTS.items())
        and all(
            _code(getattr(own, name, None)) == _code(getattr(llama, name))
            for name in ("apply_rotary_pos_emb", "rotate_half")
        )
        and type(module.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
        and _plain(module)
    )


def _same(own: type, llamas: type) -> bool:
    """Whether the two classes have the same forward."""
    return own is llamas or _code(getattr(own, "forward", None)) == _code(llamas.forward)


def _code(function: Any) -> str | None:
    return None if function is None else inspect.getsource(inspect.unwrap(function))


def _linears(layer: Any) -> list[Any]:
    attn, mlp = layer.self_attn, layer.mlp
    return [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def _plain(layer: Any) -> bool:
    return all(type(part) is nn.Linear and part.bias is None for part in _linears(layer))


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
    if not (isinstance(kwargs.get("layout"), Packed) and _plain(layer) and cos.shape[-1] == attn.head_dim):
        own: Tensor = type(layer).forward(
            layer, hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
        )
        return own
    x, turns = hidden_states[0], [y[0] for y in position_embeddings]
    first, second = (
        (norm.weight, (_Norm(norm.variance_epsilon, kernels.fused), kernels))
        for norm in (layer.input_layernorm, layer.post_attention_layernorm)
    )
    q_proj, k_proj, v_proj, *others = (part.weight for part in _linears(layer))
    parts: Any = _Projected.apply(x, first[0], *turns, first[1], q_proj, k_proj, v_proj)  # type: ignore[no-untyped-call]
    q, k, v = (part.transpose(0, 1)[None] for part in parts)
    attended = attention(attn, q, k, v, attention_mask, scaling=attn.scaling, **kwargs)[0][0].flatten(1)
    result: Tensor = _Finished.apply(x, attended, *second, *others)  # type: ignore[no-untyped-call]
    return result[None]
