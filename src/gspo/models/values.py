"""The head of a critic: the value of the text before each trained token, from the hidden state that predicts it.

In: a model that stands for a critic's backbone, or the policy itself. Out: values, float32 or better, with gradients. The
critic and the learner call it; as the policy head, it runs inside the model's own forward.

Letters: T tokens of the packed row, N trained tokens, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gspo.algorithms.segments import widened
from gspo.models.attention import Layout
from gspo.models.heads import run_head


class ValueHead(nn.Linear):
    """One number for a hidden state. It starts at 0, so that the first values say nothing and favour no token."""

    def __init__(self, hidden: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(hidden, 1, dtype=dtype, device=device)
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)
        self._job: Callable[[ValueHead, Tensor], Tensor] | None = None

    def of(self, hidden_ND: Tensor) -> Tensor:
        """Values [N], float32 or better whatever the model computes in: bfloat16 has steps of 0.004 at 1."""
        weight, bias = widened(self.weight), widened(self.bias)
        return (hidden_ND.to(weight.dtype) @ weight[0]) + bias[0]

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) if self._job is None else self._job(self, hidden)

    @contextmanager
    def armed(self, job: Callable[[ValueHead, Tensor], Tensor]) -> Iterator[None]:
        """Do `job` in the place of the forward."""
        self._job = job
        try:
            yield
        finally:
            self._job = None


def install_value_head(model: Any) -> ValueHead:
    """Put a `ValueHead` in the place of the model's output layer. The model can answer nothing from then on."""
    weight = model.get_input_embeddings().weight
    head = ValueHead(model.get_output_embeddings().in_features, dtype=weight.dtype, device=weight.device)
    model.config.tie_word_embeddings = False  # else transformers would tie it to the embeddings again
    model.set_output_embeddings(head)
    return head


def trained_values(model: Any, *, tokens_T: Tensor, position_T: Tensor, layout: Layout, source_N: Tensor) -> Tensor:
    """Values [N] at the positions `source_N` of T, with gradients; `install_value_head` comes first."""
    job = partial(_values, source_N=source_N)
    return run_head(model, job, tokens_T=tokens_T, position_T=position_T, layout=layout)


def _values(head: ValueHead, hidden: Tensor, *, source_N: Tensor) -> Tensor:
    return head.of(hidden[0].index_select(0, source_N))
