"""What an update did, in plain numbers: made by the learner, written by the journal.

Letters: N trained tokens, S sequences of a micro-batch, T tokens the model sees, L layers with experts, K experts chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithms.losses import Tally
from gspo.algorithms.segments import segment_mean
from gspo.algorithms.values import explained_variance
from gspo.batch import Batch, Microbatch


@dataclass(frozen=True)
class Parity:
    """Distance between the engine's and the trainer's log-probabilities of the same tokens under the same weights."""

    total: float = 0.0
    largest: float = 0.0
    tokens: int = 0
    signed: float = 0.0
    """Sum over sequences of the mean of log-probability trainer minus rollout."""
    sequences: int = 0

    def __add__(self, other: Parity) -> Parity:
        return Parity(
            self.total + other.total,
            max(self.largest, other.largest),
            self.tokens + other.tokens,
            self.signed + other.signed,
            self.sequences + other.sequences,
        )


@dataclass(frozen=True)
class Changes:
    """How many tokens use another set of experts in one pass than in another, layer by layer."""

    changed_L: tuple[float, ...] = ()
    tokens: float = 0.0

    def __add__(self, other: Changes) -> Changes:
        if not (self.changed_L and other.changed_L):
            return self if self.changed_L else other
        changed = tuple(a + b for a, b in zip(self.changed_L, other.changed_L, strict=True))
        return Changes(changed, self.tokens + other.tokens)

    @property
    def by_layer(self) -> list[float] | None:
        """Share of the tokens in each layer; None if nothing was compared."""
        return [changed / self.tokens for changed in self.changed_L] if self.tokens else None

    @property
    def share(self) -> float | None:
        """Of the (token, layer) pairs."""
        return sum(self.changed_L) / self.tokens / len(self.changed_L) if self.tokens else None


@dataclass(frozen=True)
class RouteChanges:
    """Choices of experts compared, each router's own: also where others are replayed."""

    rollout_old: Changes = Changes()
    """The engine's with those of the policy before the step: the same weights, unless answers are stale (`max_staleness`)."""
    old_new: Changes = Changes()
    """Those of the policy before the step with those at the update."""
    replayed: Changes = Changes()
    """The replayed ones with those that the router would now choose."""

    def __add__(self, other: RouteChanges) -> RouteChanges:
        return RouteChanges(
            self.rollout_old + other.rollout_old, self.old_new + other.old_new, self.replayed + other.replayed
        )


@dataclass(frozen=True)
class UpdateStats:
    """What one optimizer update did."""

    loss: float
    grad_norm: float
    """Before clipping to `optimizer.max_grad_norm`."""
    learning_rate: float
    entropy: float
    """Mean over trained tokens, nats."""
    trained_tokens: int
    packed_tokens: int
    micro_batches: int
    sequences: int
    """Denominators of the loss: S and N of the update."""
    tokens: int
    tally: Tally
    parity: Parity
    routes: RouteChanges = RouteChanges()
    imbalance: float = 0.0
    """The load-balancing loss, without its weight; 0 if that is 0."""
    critic: UpdateStats | None = None
    """Of the same update of a critic with a learner of its own."""


@dataclass(frozen=True)
class WeightChange:
    """How far the masters moved since the last look, on a fixed sample of every tensor."""

    changed: float
    """Share of weights that are not what they were."""
    relative: float
    """Norm of the change over the norm of the weights."""


@dataclass(frozen=True)
class ValueFit:
    """What a critic said before a step, beside what came of it; means over the tokens in the loss."""

    value: float
    outcome: float
    """Discounted sum of the rewards to come, KL term and penalty among them."""
    explained: float | None
    """Share of the variance of the outcomes; None where they do not differ."""


def value_fit(batches: Sequence[Batch]) -> ValueFit | None:
    """None without a critic, and without a batch."""
    told = [(b.value_N, b.outcome_N, b.weight_N) for b in batches]
    parts = [(v[w != 0], o[w != 0]) for v, o, w in told if v is not None and o is not None and w is not None]
    if not parts:
        return None
    value_N, outcome_N = (torch.cat(part).double() for part in zip(*parts, strict=True))
    return ValueFit(float(value_N.mean()), float(outcome_N.mean()), explained_variance(outcome_N, value_N))


def changes(one_TLK: Tensor, other_TLK: Tensor, weight_T: Tensor) -> Changes:
    """Compare sets, whatever the order inside them; a token counts by its weight."""
    changed_TL = (one_TLK.sort(-1).values != other_TLK.sort(-1).values).any(-1)
    changed_L = (changed_TL * weight_T[:, None]).sum(0)
    return Changes(tuple(changed_L.tolist()), float(weight_T.sum()))


def parity_of(logprob_N: Tensor, batch: Batch, micro: Microbatch) -> Parity:
    """The parity of one micro-batch whose `logprob_N` the trainer computed with the weights that sampled it."""
    gap_N = logprob_N.float() - batch.rollout_logprob_N[micro.trained]
    gap_S = segment_mean(gap_N, batch.sequence_N[micro.trained] - micro.sequence.start, micro.sequences)
    return Parity(
        total=float(gap_N.abs().sum()),
        largest=float(gap_N.abs().max()),
        tokens=len(gap_N),
        signed=float(gap_S.sum()),
        sequences=micro.sequences,
    )


def rollout_log_ratio(batches: Sequence[Batch]) -> Tensor:
    """[S of all updates] mean over each answer of old minus rollout log-probability: its log ratio before any update."""
    parts = []
    for batch in batches:
        assert batch.old_logprob_N is not None
        gap_N = batch.old_logprob_N - batch.rollout_logprob_N
        parts.append(segment_mean(gap_N, batch.sequence_N, len(batch.length_S)))
    return torch.cat(parts) if parts else torch.zeros(0)
