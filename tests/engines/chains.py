"""Policies whose every probability is known: a Llama that looks at the last token only, with a table for a head."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gspo.engines.engine import Request
from gspo.models.attention import ATTENTION
from gspo.models.heads import install_head
from gspo.models.load import Policy, Source
from gspo.models.tiny import tiny_tokenizer
from gspo.types import Group, Prompt, Rollout

IMPOSSIBLE = -200.0


def policy_of(model: Any, stop_ids: tuple[int, ...]) -> Policy:
    model.eval().set_attn_implementation(ATTENTION)
    install_head(model)
    dtype = next(model.parameters()).dtype
    return Policy(
        model, tiny_tokenizer(), stop_ids, Source("test", "made in memory", ""), dtype, torch.device("cpu"), ""
    )


def chain(
    table: dict[int, dict[int, float]],
    stop_ids: tuple[int, ...],
    vocabulary: int = 12,
    dtype: torch.dtype = torch.float64,
) -> Policy:
    """After token i, token j has probability table[i][j]: embeddings are one-hot and the layers add nothing."""
    shape = dict(
        hidden_size=vocabulary,
        intermediate_size=4,
        num_hidden_layers=1,
        num_attention_heads=1,
        head_dim=4,
        rms_norm_eps=0.0,
    )
    model = LlamaForCausalLM(LlamaConfig(vocab_size=vocabulary, max_position_embeddings=512, **shape)).to(dtype)
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(torch.eye(vocabulary))
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.lm_head.weight.fill_(IMPOSSIBLE)
        for i, row in table.items():
            for j, probability in row.items():
                model.lm_head.weight[j, i] = math.log(probability)
        model.lm_head.weight.div_(math.sqrt(vocabulary))  # the norm scales a one-hot vector by this
    return policy_of(model, stop_ids)


def prompt(row: int, *ids: int) -> Prompt:
    return Prompt(row, "", np.array(ids, dtype=np.int64), {})


def ask(ids: list[int], count: int, ordinal: int = 0, **keys: Any) -> Request:
    return Request(prompt(ordinal, *ids), ordinal=ordinal, count=count, **keys)


def tokens(groups: list[Group]) -> dict[tuple[int, int], list[int]]:
    """Tokens by (ordinal, index)."""
    return {(g.ordinal, r.index): written(r) for g in groups for r in g.rollouts}


def written(rollout: Rollout) -> list[int]:
    return [int(i) for i in rollout.segments[0].token_ids]
