"""What an update optimises: functions from what a forward read off to the loss of a micro-batch.

In: log-probabilities or values of the trained tokens, and the annotated batch. Out: a loss and its tally. The learner calls
them; losses of a batch's micro-batches add up to that of the update.

Letters: N trained tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gspo.algorithms.losses import PolicyInputs, Tally, policy_loss
from gspo.algorithms.values import value_loss
from gspo.batch import Batch, Microbatch
from gspo.presets import Algorithm

Objective = Callable[[Tensor, Tensor, Batch, Microbatch], tuple[Tensor, Tally]]
"""(logprob_N, entropy_N, batch, micro-batch) -> loss and tally of the micro-batch; losses of a batch add up."""


class Read(NamedTuple):
    """What a forward reads off at the trained tokens, with gradients."""

    logprob_N: Tensor
    """Or, of a critic, the value."""
    entropy_N: Tensor
    value_N: Tensor | None = None
    """Of a critic on the policy's layers."""

    def to(self, device: torch.device) -> Read:
        values = None if self.value_N is None else self.value_N.to(device)
        return Read(self.logprob_N.to(device), self.entropy_N.to(device), values)


def policy_objective(row: Algorithm) -> Objective:
    """The policy gradient of a row of the table."""

    def objective(logprob_N: Tensor, entropy_N: Tensor, batch: Batch, micro: Microbatch) -> tuple[Tensor, Tally]:
        del entropy_N
        assert batch.advantage_N is not None
        assert batch.weight_N is not None
        n = micro.trained
        # Without an old pass the weights of this very forward are the old policy.
        old_N = logprob_N.detach() if batch.old_logprob_N is None else batch.old_logprob_N[n]
        inputs = PolicyInputs(
            logprob_N=logprob_N,
            old_logprob_N=old_N,
            rollout_logprob_N=batch.rollout_logprob_N[n],
            reference_logprob_N=None if batch.reference_logprob_N is None else batch.reference_logprob_N[n],
            advantage_N=batch.advantage_N[n],
            weight_N=batch.weight_N[n],
            sequence_N=batch.sequence_N[n] - micro.sequence.start,
            sequences=micro.sequences,
        )
        return policy_loss(inputs, row)

    return objective


def value_objective(value_clip: float | None) -> Objective:
    """The value loss of a critic with a learner of its own."""

    def objective(value_N: Tensor, entropy_N: Tensor, batch: Batch, micro: Microbatch) -> tuple[Tensor, Tally]:
        del entropy_N
        return value_term(value_N, batch, micro, value_clip)

    return objective


def value_term(value_N: Tensor, batch: Batch, micro: Microbatch, value_clip: float | None) -> tuple[Tensor, Tally]:
    """The value loss of a micro-batch, weighted as the policy's loss is: c1 L_VF of arXiv 1707.06347 eq. 9, without its c1."""
    assert batch.value_N is not None
    assert batch.return_N is not None
    assert batch.weight_N is not None
    n = micro.trained
    return value_loss(value_N, batch.value_N[n], batch.return_N[n], batch.weight_N[n], value_clip)
