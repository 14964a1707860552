"""Small models of four families, and each one's own computation, sequence by sequence, as the oracle."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma3TextConfig, LlamaConfig, MistralConfig, Qwen3Config, Qwen3MoeConfig

import norms

VOCABULARY = 61
_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=256,
    initializer_range=0.3,
    eos_token_id=2,
    pad_token_id=2,
    bos_token_id=1,
)

CONFIGS: dict[str, Callable[[], Any]] = {
    "llama": lambda: LlamaConfig(**_SHAPE, tie_word_embeddings=True),
    "qwen3": lambda: Qwen3Config(**_SHAPE),
    "qwen3_moe": lambda: Qwen3MoeConfig(**_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=4),
    "gemma3": lambda: Gemma3TextConfig(**_SHAPE, sliding_window=4, layer_types=["sliding_attention", "full_attention"]),
}


def make(family: str, dtype: torch.dtype = torch.float64) -> Any:
    """A stock model, as transformers builds it; its eager attention would take softmax in float32, even of float64."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(CONFIGS[family](), dtype=dtype, attn_implementation="sdpa").eval()
    if family == "qwen3_moe" and dtype == torch.float64:
        model.set_experts_implementation("eager")  # the grouped product has no float64
    if dtype == torch.float64:
        norms.in_float64(model)
    return model


def sequences(lengths: list[int], seed: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, VOCABULARY, (n,), generator=generator) for n in lengths]


def one_by_one(model: Any, tokens: list[Tensor], answers: list[int], temperature: float) -> tuple[Tensor, Tensor]:
    """Log-probability and entropy of the last `answers[i]` tokens of each sequence, each sequence alone."""
    logprobs, entropies = [], []
    for ids, answer in zip(tokens, answers, strict=True):
        logp = torch.log_softmax(
            model(input_ids=ids[None], use_cache=False).logits[0, -answer - 1 : -1] / temperature, -1
        )
        logprobs.append(logp.gather(1, ids[-answer:, None])[:, 0])
        entropies.append(-(logp.exp() * logp).sum(1))
    return torch.cat(logprobs), torch.cat(entropies)


def packed(tokens: list[Tensor], answers: list[int]) -> dict[str, Tensor]:
    """The same tokens as the packed row that `trained_logprobs` takes, but for its layout."""
    tokens_T = torch.cat(tokens)
    ends = torch.tensor([len(ids) for ids in tokens]).cumsum(0).tolist()
    source_N = torch.cat([torch.arange(end - answer - 1, end - 1) for end, answer in zip(ends, answers, strict=True)])
    return dict(
        tokens_T=tokens_T,
        position_T=torch.cat([torch.arange(len(ids)) for ids in tokens]),
        source_N=source_N,
        target_N=tokens_T[source_N + 1],
    )


@dataclass(frozen=True)
class Tree:
    """Segments of tokens, each hanging on an earlier one or on nothing."""

    tokens: list[Tensor]
    parents: list[int | None]

    def path(self, i: int) -> list[int]:
        parent = self.parents[i]
        return [i] if parent is None else [*self.path(parent), i]

    def above(self, i: int) -> Tensor:
        """Every token above segment i."""
        return torch.cat([torch.empty(0, dtype=torch.int64), *(self.tokens[j] for j in self.path(i)[:-1])])

    def rows(self) -> dict[str, Tensor]:
        """What `trained_logprobs` takes, but for the layout: every token of a segment that hangs is a target."""
        lengths = [len(ids) for ids in self.tokens]
        starts = torch.tensor([0, *lengths]).cumsum(0).tolist()
        sources, targets = [], []
        for i, parent in enumerate(self.parents):
            if parent is not None:
                own = list(range(starts[i], starts[i + 1]))
                sources += [starts[parent + 1] - 1, *own[:-1]]
                targets += own
        tokens_T = torch.cat(self.tokens)
        positions = [torch.arange(len(ids)) + len(self.above(i)) for i, ids in enumerate(self.tokens)]
        return dict(
            tokens_T=tokens_T,
            position_T=torch.cat(positions),
            source_N=torch.tensor(sources),
            target_N=tokens_T[torch.tensor(targets)],
        )

    def one_by_one(self, model: Any, temperature: float) -> tuple[Tensor, Tensor]:
        """The same from the model itself: each hanging segment after all that stands above it, alone."""
        hanging = [i for i, parent in enumerate(self.parents) if parent is not None]
        whole = [torch.cat([self.above(i), self.tokens[i]]) for i in hanging]
        return one_by_one(model, whole, [len(self.tokens[i]) for i in hanging], temperature)


def tree(lengths: list[int], parents: list[int | None], seed: int = 5) -> Tree:
    return Tree(sequences(lengths, seed), parents)


def relative_gap(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
