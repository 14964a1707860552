"""Which models have Llama's very code: known by their source, not by their name.

In: modules of transformers. Out: whether they compute what Llama's do. The trainer's `layers` and the engine's `decoder`
ask, before they compute it by a shorter way.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn
from transformers.models.llama import modeling_llama as llama

_PARTS = {
    "self_attn": llama.LlamaAttention,
    "mlp": llama.LlamaMLP,
    "input_layernorm": llama.LlamaRMSNorm,
    "post_attention_layernorm": llama.LlamaRMSNorm,
}


def is_llamas_layer(layer: Any) -> bool:
    """Whether the layer, its parts and the rotation of positions have Llama's code, and its weights are plain."""
    return _has_llamas_code(layer) and plain(layer)


def _has_llamas_code(layer: Any) -> bool:
    own = inspect.getmodule(type(layer))
    return (
        same(layer, llama.LlamaDecoderLayer)
        and all(same(getattr(layer, name, None), theirs) for name, theirs in _PARTS.items())
        and all(
            _code(getattr(own, name, None)) == _code(getattr(llama, name))
            for name in ("apply_rotary_pos_emb", "rotate_half")
        )
        and type(layer.mlp.act_fn).__name__ in ("SiLU", "SiLUActivation")
    )


def is_llamas(model: Any) -> bool:
    """Whether every module from embedding to last norm is of Llama's kind, whatever its weights are."""
    base = model.base_model
    return (
        same(model, llama.LlamaForCausalLM)
        and same(base, llama.LlamaModel)
        and same(base.norm, llama.LlamaRMSNorm)
        and type(base.embed_tokens) is nn.Embedding
        and all(_has_llamas_code(layer) for layer in base.layers)
    )


def same(module: Any, llamas: type) -> bool:
    """Whether the module's class has the forward of Llama's class."""
    return type(module) is llamas or _code(getattr(type(module), "forward", None)) == _code(
        getattr(llamas, "forward", None)
    )


def linears(layer: Any) -> list[nn.Linear]:
    """Query, key, value, output, gate, up, down; any of them may be under an adapter."""
    attn, mlp = layer.self_attn, layer.mlp
    return [attn.q_proj, attn.k_proj, attn.v_proj, attn.o_proj, mlp.gate_proj, mlp.up_proj, mlp.down_proj]


def plain(layer: Any) -> bool:
    """Whether the layer's weights are plain: no biases, and no adapter."""
    return all(type(part) is nn.Linear and part.bias is None for part in linears(layer))


def _code(function: Any) -> str | None:
    return None if function is None else inspect.getsource(inspect.unwrap(function))
