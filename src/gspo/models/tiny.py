"""Small models, made in memory from a fixed seed, with a tokenizer that has one token a character.

In: nothing. Out: Hugging Face models and a tokenizer that can be saved and loaded like any other. They know
nothing: `tiny_dense` and `tiny_moe` are there to try things in a second (recipes, user code, tests), the other three
are what the built-in models `tiny-dense`, `tiny-moe` and `fine-moe` were before they were trained. Called by `builtin`.
"""

from __future__ import annotations

from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, PreTrainedTokenizerFast, Qwen3MoeConfig

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz +-*/=?.:;,!<>()'\n"
_CHAT = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
_SEED = 20250724
_START = 0.125
"""Spread of the first weights, one over the root of the width: the usual 0.02 is for wide models, and learns late here."""


def tiny_tokenizer(*, chat: bool = True) -> PreTrainedTokenizerFast:
    """Capitals are read as small letters; any other character is `<unk>`. `chat`: with a chat template."""
    vocabulary = {token: i for i, token in enumerate((*_SPECIAL, *_CHARACTERS))}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    core.decoder = decoders.Fuse()
    pad, bos, eos, unknown = _SPECIAL
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=core,
        pad_token=pad,
        bos_token=bos,
        eos_token=eos,
        unk_token=unknown,
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = _CHAT if chat else None
    return tokenizer


def _shape(tokenizer: PreTrainedTokenizerFast, **own: Any) -> dict[str, Any]:
    common: dict[str, Any] = dict(
        vocab_size=len(tokenizer),
        hidden_size=64,
        num_attention_heads=4,
        head_dim=16,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    return common | own


def _build(config: PreTrainedConfig) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(_SEED)
        return AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # type: ignore[no-untyped-call]


def tiny_dense() -> tuple[Any, Any]:
    """A Llama with 2 layers of width 64, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    shape = _shape(tokenizer, num_hidden_layers=2, intermediate_size=128, num_key_value_heads=2)
    return _build(LlamaConfig(**shape)), tokenizer


def tiny_moe() -> tuple[Any, Any]:
    """A Qwen3-MoE with 2 layers of width 64, 4 experts, 2 of them for each token, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    shape = _shape(
        tokenizer,
        num_hidden_layers=2,
        intermediate_size=128,
        num_key_value_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    return _build(Qwen3MoeConfig(**shape)), tokenizer


def untrained_dense() -> Any:
    """A Llama with 3 layers of width 64: 155 thousand parameters."""
    shape = _shape(
        tiny_tokenizer(),
        num_hidden_layers=3,
        intermediate_size=176,
        num_key_value_heads=4,
        initializer_range=_START,
    )
    return _build(LlamaConfig(**shape))


def untrained_moe() -> Any:
    """A Qwen3-MoE with 4 layers of width 64, 16 experts, 2 of them for each token: 246 thousand parameters."""
    return _moe(layers=4, experts=16, chosen=2, width=16)


def untrained_fine_moe() -> Any:
    """A Qwen3-MoE with 8 layers of width 64, 32 experts, 4 of them for each token: 497 thousand parameters."""
    return _moe(layers=8, experts=32, chosen=4, width=8)


def _moe(*, layers: int, experts: int, chosen: int, width: int) -> Any:
    shape = _shape(
        tiny_tokenizer(),
        num_hidden_layers=layers,
        intermediate_size=128,  # of dense layers, of which there are none
        num_key_value_heads=1,
        num_experts=experts,
        num_experts_per_tok=chosen,
        moe_intermediate_size=width,
        norm_topk_prob=True,
        initializer_range=_START,
    )
    return _build(Qwen3MoeConfig(**shape))
