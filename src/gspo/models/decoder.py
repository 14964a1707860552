"""A model whose weights stand still, as the engine runs it: what is made of them once, and the shortest way through them.

In: tokens and a layout of `cache`. Out: logits. The local engine makes one for a round of sampling.

Letters: T tokens, N chosen positions, V vocabulary, K width, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.models.attention import Layout
from gspo.models.cache import Step
from gspo.models.heads import next_logits, predict
from gspo.models.llamas import is_llamas, linears
from gspo.models.native import Kernels
from gspo.models.packing import PackedWeights


class Decoder:
    """`logits` of a model, from weights that are packed, or read as they lie by `kernels`, and layers without detours."""

    def __init__(self, model: Any, kernels: Kernels | None) -> None:
        self._model, self._kernels, self._head = model, kernels, model.get_output_embeddings()
        self._packed = PackedWeights(model, kernels)
        self._layers = None if kernels is None else layers_of(model, self._packed, kernels)
        native = kernels is not None and kernels.multiplies(self._head.weight)
        self._factor_VD = None if native else self._head.factor()

    def logits(self, tokens_T: Tensor, position_T: Tensor, layout: Layout, source_N: Tensor) -> Tensor:
        """Logits [N, V] at the positions `source_N`, as `heads.next_logits`."""
        chosen: dict[str, Any] = dict(source_N=source_N, factor_VD=self._factor_VD, kernels=self._kernels)
        if self._layers is not None and isinstance(layout, Step):
            return predict(self._head, self._layers.hidden(tokens_T, position_T, layout)[None], **chosen)
        with self._packed:
            return next_logits(self._model, tokens_T=tokens_T, position_T=position_T, layout=layout, **chosen)


@dataclass(frozen=True)
class _Weights:
    """Those of a layer, as the kernels multiply with them."""

    before: Any
    """The norm before the attention, ..."""
    after: Any
    """... and the one after it."""
    qkv: tuple[Tensor, ...]
    out: Tensor
    gate_up: tuple[Tensor, ...]
    down: Tensor
    scaling: float


class Layers:
    """Layers of Llama's kind, from embedding to last norm, kernel by kernel."""

    def __init__(self, base: Any, layers: list[_Weights], kernels: Kernels) -> None:
        self._base, self._layers, self._kernels = base, layers, kernels
        self._size = base.layers[0].self_attn.head_dim

    def hidden(self, tokens_T: Tensor, position_T: Tensor, layout: Layout) -> Tensor:
        """Hidden states [T, K], for the head."""
        base, kernels, size = self._base, self._kernels, self._size
        x = base.embed_tokens(tokens_T)
        cos, sin = (y[0] for y in base.rotary_emb(x[None], position_T[None]))
        heads, key_heads = (w.shape[0] // size for w in self._layers[0].qkv[:2])
        more = None  # what the layer before adds to x: the next norm does it on the way
        for number, layer in enumerate(self._layers):
            rows = kernels.product(_normed(kernels, layer.before, x, more), *layer.qkv)
            kernels.rotate(rows, heads + key_heads, cos, sin)
            each = rows.view(rows.shape[0], -1, size).transpose(0, 1)[None]
            q, k, v = torch.split(each, [heads, key_heads, key_heads], 1)
            attended = layout.attend(number, q, k, v, scaling=layer.scaling, window=None)[0].flatten(1)
            rows = _normed(kernels, layer.after, x, kernels.product(attended, layer.out))
            more = kernels.product(kernels.gate(kernels.product(rows, *layer.gate_up)), layer.down)
        return _normed(kernels, base.norm, x, more)


def _normed(kernels: Kernels, norm: Any, x: Tensor, more: Tensor | None) -> Tensor:
    return kernels.norm(x, norm.weight, norm.variance_epsilon, more)


def _weights(layer: Any, packed: PackedWeights, kernels: Kernels) -> _Weights | None:
    """None for shapes that the kernels do not take, and where something is added beside the product."""
    found = [
        weight for part in linears(layer) if (weight := packed.of(part)) is not None and kernels.multiplies(weight)
    ]
    if len(found) < len(linears(layer)):
        return None
    q, k, v, out, gate, up, down = found
    return _Weights(
        layer.input_layernorm, layer.post_attention_layernorm, (q, k, v), out, (gate, up), down, layer.self_attn.scaling
    )


# ------------------------------------------------------------------------------ which models it knows


def layers_of(model: Any, packed: PackedWeights, kernels: Kernels) -> Layers | None:
    """None unless every module from embedding to last norm has Llama's code, and shapes that the kernels take."""
    if not (is_llamas(model) and all(_suits(layer) for layer in model.base_model.layers)):
        return None
    layers = [found for x in model.base_model.layers if (found := _weights(x, packed, kernels)) is not None]
    return Layers(model.base_model, layers, kernels) if len(layers) == len(model.base_model.layers) else None


def _suits(layer: Any) -> bool:
    # Turned by halves, 16 numbers at a time, each head as a whole.
    whole = (
        layer.self_attn.head_dim % 32 == 0
        and layer.self_attn.config.rope_parameters.get("partial_rotary_factor", 1) == 1
    )
    hooked = any(m._forward_hooks or m._forward_pre_hooks for m in layer.modules())
    return whole and not hooked
