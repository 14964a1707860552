"""Annotated log-probabilities in, advantages and loss weights out: who gets how much of an update's credit.

The learner calls `weigh` once a step, when the old and reference passes are done.

Letters: N trained tokens, S sequences packed, R judged rollouts of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithms.advantages import advantages, token_weights
from gspo.algorithms.losses import kl_term
from gspo.algorithms.segments import segment_sum
from gspo.batch import Batch
from gspo.presets import Algorithm


def weigh(batches: Sequence[Batch], row: Algorithm, max_new_tokens: int, dtype: torch.dtype) -> list[Batch]:
    """The updates of a step with `advantage_R`, `advantage_N` and `weight_N` in `dtype`.

    A baseline over the whole batch is that of the step: all its updates are seen at once.
    """
    if not batches:
        return []
    reward_R = torch.cat([_penalised(batch, row) for batch in batches])
    group_R = torch.cat([batch.group_R for batch in batches])
    parts = torch.split(advantages(row, reward_R, group_R), [len(b.reward_R) for b in batches])
    return [
        _spread(batch, advantage_R, _weights(batch, row, max_new_tokens), dtype)
        for batch, advantage_R in zip(batches, parts, strict=True)
    ]


def _penalised(batch: Batch, row: Algorithm) -> Tensor:
    """Rewards less the KL from the reference, if that is where the row puts it: r - beta sum_t kl_t."""
    if not (row.needs_reference and row.kl_in == "reward"):
        return batch.reward_R
    assert batch.old_logprob_N is not None
    assert batch.reference_logprob_N is not None
    kl_N = kl_term(row.kl_estimator, batch.old_logprob_N, batch.old_logprob_N, batch.reference_logprob_N)
    kl_S = segment_sum(kl_N, batch.sequence_N, len(batch.length_S)).double()
    return batch.reward_R.index_add(0, batch.rollout_S, kl_S, alpha=-row.kl_coefficient)


def _weights(batch: Batch, row: Algorithm, max_new_tokens: int) -> Tensor:
    return token_weights(
        row,
        length_S=batch.length_S,
        sequence_N=batch.sequence_N,
        sequences=batch.sequences,
        tokens=batch.tokens,
        max_new_tokens=max_new_tokens,
    )


def _spread(batch: Batch, advantage_R: Tensor, weight_N: Tensor, dtype: torch.dtype) -> Batch:
    return replace(
        batch,
        advantage_R=advantage_R,
        advantage_N=advantage_R[batch.rollout_S][batch.sequence_N].to(dtype),
        weight_N=weight_N.to(dtype) * batch.counted_S[batch.sequence_N],
    )
