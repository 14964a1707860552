"""Annotated log-probabilities and values in, advantages and loss weights out: who gets how much of an update's credit.

The learner calls `weigh` once a step, when the old and reference passes are done, and the critic's.

Letters: N trained tokens, S sequences packed, R judged rollouts of an update.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithms.advantages import advantages, token_weights
from gspo.algorithms.losses import kl_term
from gspo.algorithms.segments import segment_mean, segment_sum
from gspo.algorithms.values import gae, whitened
from gspo.batch import Batch
from gspo.critic_config import Critic
from gspo.presets import Algorithm


def weigh(
    batches: Sequence[Batch], row: Algorithm, max_new_tokens: int, dtype: torch.dtype, critic: Critic | None = None
) -> list[Batch]:
    """The updates of a step with `advantage_R`, `advantage_N` and `weight_N` in `dtype`; with a critic, `return_N` too.

    A baseline over the whole batch is that of the step: all its updates are seen at once.
    """
    if not batches:
        return []
    weighed = [replace(b, weight_N=_weights(b, row, max_new_tokens).to(dtype) * _counted(b)) for b in batches]
    if critic is not None:
        return _by_values(weighed, row, critic, dtype)
    reward_R = torch.cat([_penalised(batch, row) for batch in weighed])
    group_R = torch.cat([batch.group_R for batch in weighed])
    parts = torch.split(advantages(row, reward_R, group_R), [len(b.reward_R) for b in weighed])
    return [_spread(batch, advantage_R, dtype) for batch, advantage_R in zip(weighed, parts, strict=True)]


def _counted(batch: Batch) -> Tensor:
    return batch.counted_S[batch.sequence_N]


def answer_kl(batch: Batch, row: Algorithm) -> Tensor | None:
    """[S] float64: KL of each packed answer from the reference, as the reward has it; None if that has none."""
    kl_N = _kl(batch, row)
    return None if kl_N is None else segment_sum(kl_N.double(), batch.sequence_N, len(batch.length_S))


def _kl(batch: Batch, row: Algorithm) -> Tensor | None:
    """[N] the KL term of the reward at each token."""
    if not (row.needs_reference and row.kl_in == "reward"):
        return None
    assert batch.old_logprob_N is not None
    assert batch.reference_logprob_N is not None
    return kl_term(row.kl_estimator, batch.old_logprob_N, batch.old_logprob_N, batch.reference_logprob_N)


def _penalised(batch: Batch, row: Algorithm) -> Tensor:
    """Rewards less the KL from the reference, if that is where the row puts it: r - beta sum_t kl_t."""
    kl_S = answer_kl(batch, row)
    if kl_S is None:
        return batch.reward_R
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


def _spread(batch: Batch, advantage_R: Tensor, dtype: torch.dtype) -> Batch:
    advantage_N = advantage_R[batch.rollout_S][batch.sequence_N].to(dtype)
    return replace(batch, advantage_R=advantage_R, advantage_N=advantage_N)


# ------------------------------------------------------------------------------ with a critic


def token_rewards(batch: Batch, row: Algorithm, end_penalty: float) -> Tensor:
    """[N] float64: minus the KL term at each token, and at an answer's last one its reward, less the penalty if it was cut.

    The last token is the last that the policy wrote, whatever came after it (arXiv 1909.08593 section 2.2; 2203.02155
    eq. 2).
    """
    kl_N = _kl(batch, row)
    zeros_N = torch.zeros(len(batch.target_N), dtype=torch.float64, device=batch.reward_R.device)
    reward_N = zeros_N if kl_N is None else -row.kl_coefficient * kl_N.double()
    score_S = (batch.reward_R - end_penalty * batch.unended_R)[batch.rollout_S]
    return reward_N.index_add(0, batch.length_S.cumsum(0) - 1, score_S)


def _by_values(batches: Sequence[Batch], row: Algorithm, critic: Critic, dtype: torch.dtype) -> list[Batch]:
    """Advantages by GAE, whitened over the step; `advantage_R` is the mean over an answer's tokens, 0 for one left out."""
    advantages_N, annotated = [], []
    for batch in batches:
        assert batch.value_N is not None
        reward_N = token_rewards(batch, row, critic.end_penalty)
        advantage_N, return_N = gae(
            reward_N, batch.value_N, batch.length_S, gamma=critic.gamma, gae_lambda=critic.gae_lambda
        )
        _, outcome_N = gae(reward_N, batch.value_N, batch.length_S, gamma=critic.gamma, gae_lambda=1.0)
        advantages_N.append(advantage_N)
        annotated.append(replace(batch, return_N=return_N.to(dtype), outcome_N=outcome_N.to(dtype)))
    if critic.whiten:
        counted_N = torch.cat([_counted(batch) for batch in batches])
        together_N = whitened(torch.cat(advantages_N), counted_N)
        advantages_N = list(torch.split(together_N, [len(a) for a in advantages_N]))
    return [_told(batch, advantage_N, dtype) for batch, advantage_N in zip(annotated, advantages_N, strict=True)]


def _told(batch: Batch, advantage_N: Tensor, dtype: torch.dtype) -> Batch:
    mean_S = segment_mean(advantage_N, batch.sequence_N, len(batch.length_S))
    advantage_R = torch.zeros_like(batch.reward_R).index_copy(0, batch.rollout_S, mean_S)
    return replace(batch, advantage_R=advantage_R, advantage_N=advantage_N.to(dtype))
