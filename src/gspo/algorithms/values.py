"""What a critic's values are for: advantages of each token, what the values are trained on, and the size of the KL term.

In: rewards and values of packed tokens, whole answers one behind the other, only tokens that the policy wrote. Out:
advantages and returns, the value loss, the next KL coefficient. `credit.py` calls the first two, `critic.py` the others.

A token that a tool or a template wrote is no step of the policy: it is not here at all, so it costs no decay, and no
value is read at it.

Suffixes: _N trained tokens (packed, in the order in which they were written), _S sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from gspo.algorithms.advantages import ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE
from gspo.algorithms.segments import widened
from gspo.algorithms.tally import Tally

KL_GAIN = 0.1
"""K_beta of the controller, arXiv 1909.08593 section 2.2."""
KL_ERROR = 0.2
"""Bound on its proportional error, from the same place."""


@torch.no_grad()
def gae(
    reward_N: Tensor, value_N: Tensor, length_S: Tensor, *, gamma: float, gae_lambda: float
) -> tuple[Tensor, Tensor]:
    """Advantage and return of each token, both [N] float64 (GAE, arXiv 1506.02438 eq. 16; PPO, arXiv 1707.06347 eq. 11-12).

    delta_t = r_t + gamma V_t+1 - V_t and A_t = delta_t + gamma lambda A_t+1, with V = A = 0 behind an answer's last
    token; the return is A + V. With gae_lambda=1 it is the discounted sum of the rewards to come, whatever the values.

    Args:
        reward_N: reward at each token.
        value_N: value of the text before each token, by the critic as it was when the answers were given to it.
        length_S: tokens of each answer, in the order of the packing.
    """
    length_S = length_S.long()
    longest = int(length_S.max()) if len(length_S) else 0
    inside_ST = torch.arange(longest, device=length_S.device)[None] < length_S[:, None]
    reward_ST, value_ST = (
        torch.zeros(inside_ST.shape, dtype=torch.float64, device=x.device).masked_scatter(inside_ST, x.double())
        for x in (reward_N, value_N)
    )
    advantage_ST = torch.zeros_like(reward_ST)
    next_value_S = next_advantage_S = reward_ST.new_zeros(len(length_S))
    for t in reversed(range(longest)):
        delta_S = reward_ST[:, t] + gamma * next_value_S - value_ST[:, t]
        # Beyond the end of an answer all is 0, and so is what is handed back to its last token.
        next_advantage_S = torch.where(inside_ST[:, t], delta_S + gamma * gae_lambda * next_advantage_S, 0.0)
        next_value_S = value_ST[:, t]
        advantage_ST[:, t] = next_advantage_S
    advantage_N = advantage_ST[inside_ST]
    return advantage_N, advantage_N + value_N.double()


@torch.no_grad()
def whitened(advantage_N: Tensor, counted_N: Tensor) -> Tensor:
    """Advantages less their mean, over their standard deviation (ddof 1), both of the counted ones; exactly 0 where all agree.

    Over all the tokens of a step, so that no update of it has a scale of its own. A detail of practice and not of the
    paper; it is that of arXiv 1909.08593's code and of those that follow it.
    """
    known_N = advantage_N[counted_N]
    if len(known_N) < 2:
        return torch.zeros_like(advantage_N)
    low, high = known_N.aminmax()
    if float(high - low) <= max(ABSOLUTE_TOLERANCE, RELATIVE_TOLERANCE * float(known_N.abs().max())):
        return torch.zeros_like(advantage_N)
    return (advantage_N - known_N.mean()) / known_N.std()


def value_loss(
    value_N: Tensor, old_value_N: Tensor, return_N: Tensor, weight_N: Tensor, value_clip: float | None
) -> tuple[Tensor, Tally]:
    """1/2 sum_N weight_N max((V - R)^2, (clip(V, V_old -+ value_clip) - R)^2), with gradient to `value_N`, and its tally.

    The square is that of arXiv 1707.06347 eq. 9; its half and the clip are conventions of OpenAI's code. `value_clip` is
    in units of the reward; None: the plain square.
    """
    value_N = widened(value_N)
    old_N, return_N, weight_N = (x.detach().to(value_N.dtype) for x in (old_value_N, return_N, weight_N))
    term_N = (value_N - return_N).square()
    lost_N = torch.zeros_like(term_N, dtype=torch.bool)
    if value_clip is not None:
        near_N = old_N + (value_N - old_N).clamp(-value_clip, value_clip)
        bounded_N = (near_N - return_N).square()
        # Where the value has left the band on the side of the return, the clipped square is the larger, and has no gradient.
        lost_N = (bounded_N > term_N).detach()
        term_N = torch.where(lost_N, bounded_N.detach(), term_N)
    loss = (weight_N * term_N).sum() / 2
    counted_N = weight_N != 0
    return loss, Tally(
        value_loss=float(loss.detach()), values=int(counted_N.sum()), values_clipped=int((lost_N & counted_N).sum())
    )


@torch.no_grad()
def explained_variance(outcome_N: Tensor, value_N: Tensor) -> float | None:
    """1 - Var(outcome - value) / Var(outcome): 1 if the values say what came of each token, 0 if they say as much as a
    constant, less if worse; None where the outcomes do not differ."""
    outcome_N = outcome_N.double()
    if len(outcome_N) < 2 or float(outcome_N.amax() - outcome_N.amin()) <= ABSOLUTE_TOLERANCE:
        return None
    return 1 - float((outcome_N - value_N.double()).var(correction=0) / outcome_N.var(correction=0))


def next_kl_coefficient(coefficient: float, kl_S: Sequence[float], target: float) -> float:
    """The coefficient of the next step: coefficient (1 + 0.1 clip(KL / target - 1, -0.2, 0.2)), arXiv 1909.08593 section 2.2.

    Args:
        kl_S: log pi / reference of each answer, summed over its tokens, nats.
        target: mean of that which is aimed at.
    """
    if not kl_S:
        return coefficient
    error = math.fsum(kl_S) / len(kl_S) / target - 1
    return coefficient * (1 + KL_GAIN * min(max(error, -KL_ERROR), KL_ERROR))
