"""What each answer is compared with, and how much each of its tokens counts.

In: rewards and group numbers per sequence; lengths, and the counts of the whole update. Out: one
advantage per sequence, one weight per trained token. `batch.py` and `learner.py` call it.

Suffixes: _N trained tokens (packed), _S sequences (rollouts), _G groups.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithms.segments import segment_mean, segment_sum, spread
from gspo.presets import Algorithm

RELATIVE_TOLERANCE = 1e-6
ABSOLUTE_TOLERANCE = 1e-9
"""Rewards agree if they lie within 1e-6 of the largest of them, or within 1e-9: rounding (1.0 and 0.7 + 0.2 + 0.1,
in float32 too) is not a difference between answers, and a standard deviation must not make one of it."""


def carries_signal(rewards: Sequence[float]) -> bool:
    """False if a baseline leaves nothing of these rewards: fewer than two, or all equal within the tolerance.

    Raises ValueError for a reward that is not finite; None is left out by the caller.
    """
    for reward in rewards:
        if not math.isfinite(reward):
            raise ValueError(f"a reward is {reward}; an answer without a verdict must be left out of its group")
    if len(rewards) < 2:
        return False
    low, high = min(rewards), max(rewards)
    return high - low > max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * max(abs(low), abs(high)))


@dataclass(frozen=True)
class _Pool:
    """Rewards that are compared with one another: those of a group, or all of them."""

    member_S: Tensor
    """[S] int64: number of the pool that each sequence is in, 0..pools-1."""
    pools: int
    size_S: Tensor
    """[S] float64: number of members of its pool."""
    signal_S: Tensor
    """[S] bool: the pool carries signal."""


def _pool(reward_S: Tensor, member_S: Tensor, pools: int) -> _Pool:
    infinite = torch.full((pools,), torch.inf, dtype=torch.float64, device=reward_S.device)
    low = infinite.scatter_reduce(0, member_S, reward_S, "amin")
    high = (-infinite).scatter_reduce(0, member_S, reward_S, "amax")
    bound = (RELATIVE_TOLERANCE * torch.maximum(low.abs(), high.abs())).clamp(min=ABSOLUTE_TOLERANCE)
    size_S = spread(segment_sum(torch.ones_like(reward_S), member_S, pools), member_S)
    return _Pool(member_S, pools, size_S, spread((high - low > bound).double(), member_S) > 0)


def _groups(reward_S: Tensor, group_S: Tensor) -> _Pool:
    ids_G, member_S = torch.unique(group_S, return_inverse=True)
    return _pool(reward_S, member_S, len(ids_G))


def _batch(reward_S: Tensor) -> _Pool:
    return _pool(reward_S, torch.zeros_like(reward_S, dtype=torch.int64), 1)


def _centred(x_S: Tensor, pool: _Pool) -> Tensor:
    """x less its pool's mean; exactly 0 where the pool carries no signal."""
    mean_S = spread(segment_mean(x_S, pool.member_S, pool.pools), pool.member_S)
    return torch.where(pool.signal_S, x_S - mean_S, 0.0)


def _deviation(centred_S: Tensor, pool: _Pool, row: Algorithm) -> Tensor:
    """Standard deviation of each one's pool, from the centred values (stable); 1 where there is no signal."""
    square_S = spread(segment_sum(centred_S.square(), pool.member_S, pool.pools), pool.member_S)
    deviation_S = (square_S / (pool.size_S - row.advantage_ddof).clamp(min=1)).sqrt() + row.advantage_epsilon
    return torch.where(pool.signal_S, deviation_S, 1.0)


def _group_mean_std(reward_S: Tensor, group_S: Tensor, row: Algorithm) -> Tensor:
    """GRPO, arXiv 2402.03300; GSPO, arXiv 2507.18071 eq. 6. At most sqrt(n - 1) in size."""
    pool = _groups(reward_S, group_S)
    centred_S = _centred(reward_S, pool)
    return centred_S / _deviation(centred_S, pool, row)


def _group_mean(reward_S: Tensor, group_S: Tensor, row: Algorithm) -> Tensor:
    """Dr. GRPO, arXiv 2503.20783."""
    return _centred(reward_S, _groups(reward_S, group_S))


def _leave_one_out(reward_S: Tensor, group_S: Tensor, row: Algorithm) -> Tensor:
    """RLOO, arXiv 2402.14740: the reward less the mean of the others of its group."""
    pool = _groups(reward_S, group_S)
    return _centred(reward_S, pool) * (pool.size_S / (pool.size_S - 1).clamp(min=1))


def _batch_mean_std(reward_S: Tensor, group_S: Tensor, row: Algorithm) -> Tensor:
    """REINFORCE++, arXiv 2501.03262: mean and deviation of all rewards given."""
    pool = _batch(reward_S)
    centred_S = _centred(reward_S, pool)
    return centred_S / _deviation(centred_S, pool, row)


def _group_mean_batch_std(reward_S: Tensor, group_S: Tensor, row: Algorithm) -> Tensor:
    """REINFORCE++ with a group baseline: less the group's mean, over the deviation of what is left in the whole batch.

    What is left has the mean 0 already, so it is not centred again: a group without variance stays exactly 0.
    """
    groups, batch = _groups(reward_S, group_S), _batch(reward_S)
    centred_S = _centred(reward_S, groups)
    some_S = groups.signal_S.any().expand_as(groups.signal_S)
    return centred_S / _deviation(centred_S, _Pool(batch.member_S, 1, batch.size_S, some_S), row)


_ADVANTAGES: dict[str, Callable[[Tensor, Tensor, Algorithm], Tensor]] = {
    "group_mean_std": _group_mean_std,
    "group_mean": _group_mean,
    "leave_one_out": _leave_one_out,
    "batch_mean_std": _batch_mean_std,
    "group_mean_batch_std": _group_mean_batch_std,
}


@torch.no_grad()
def advantages(row: Algorithm, reward_S: Tensor, group_S: Tensor) -> Tensor:
    """Advantage of each sequence, [S] float64, by the row's `advantage`, `advantage_ddof` and `advantage_epsilon`.

    Args:
        reward_S: rewards, finite; those without a verdict are left out by the caller.
        group_S: the group of each, any integers, in any order, groups of any size.

    A group (or batch) without variance, and a group of one, is exactly 0.

    Raises ValueError for a reward that is not finite, and for a row whose advantages come from a critic.
    """
    if row.advantage not in _ADVANTAGES:
        raise ValueError(
            f"advantage={row.advantage} is not made of rewards alone: it needs a critic's values per token"
        )
    if not bool(torch.isfinite(reward_S).all()):
        raise ValueError("a reward is not finite; an answer without a verdict must be left out of its group")
    return _ADVANTAGES[row.advantage](reward_S.double(), group_S, row)


# ------------------------------------------------------------------------------ weights


@dataclass(frozen=True)
class _Update:
    """The whole optimizer update, all micro-batches and all ranks."""

    sequences: int
    tokens: int
    constant: int


_WEIGHTS: dict[str, Callable[[Tensor, _Update], Tensor]] = {
    "sequence_mean": lambda length_N, update: 1 / (update.sequences * length_N),
    "token_mean": lambda length_N, update: torch.full_like(length_N, 1 / update.tokens),
    "sequence_sum": lambda length_N, update: torch.full_like(length_N, 1 / update.sequences),
    "constant": lambda length_N, update: torch.full_like(length_N, 1 / (update.sequences * update.constant)),
}


def token_weights(
    row: Algorithm, *, length_S: Tensor, sequence_N: Tensor, sequences: int, tokens: int, max_new_tokens: int
) -> Tensor:
    """Weight of each trained token, [N] float64: the aggregation, as the factor of a plain sum.

    1/(S n) for `sequence_mean`, 1/N for `token_mean`, 1/S for `sequence_sum`, 1/(S L) for `constant`.

    Args:
        length_S: trained tokens of each sequence, indexed by `sequence_N`.
        sequences: S, sequences with a trained token in the whole update, before anything is dropped.
        tokens: N, trained tokens of the whole update, before anything is dropped.
        max_new_tokens: L, unless the row sets `length_constant`.

    Counts of a micro-batch or of one rank instead of the update's would scale the gradient by their number
    (verl-project/verl#7913); counts too small for what is given are refused with ValueError.
    """
    if len(sequence_N) > tokens:
        raise ValueError(f"{len(sequence_N)} tokens are given and the whole update is said to have {tokens}")
    if len(sequence_N) and sequences < 1:
        raise ValueError(f"{len(sequence_N)} tokens are given and the whole update is said to have no sequence")
    length_N = spread(length_S.double(), sequence_N)
    update = _Update(max(sequences, 1), max(tokens, 1), row.length_constant or max_new_tokens)
    return _WEIGHTS[row.aggregation](length_N, update)
