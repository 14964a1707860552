"""Groups in, packed batches out: one `Batch` for each optimizer update, with its micro-batch plan.

`train` calls `make_batches` once a step. The denominators of the loss are counted here, over every judged
rollout of the update, before anything without a gradient is dropped: so dropping is exact.

Letters: T tokens the model sees (packed), N trained tokens, S sequences packed, R judged rollouts of the update.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.algorithms.advantages import carries_signal
from gspo.errors import RunError
from gspo.presets import Algorithm
from gspo.types import Group, Rollout, Stop


@dataclass(frozen=True)
class Microbatch:
    """Whole sequences that go through the model together: slices into the batch."""

    token: slice
    trained: slice
    sequence: slice
    lengths: tuple[int, ...]
    """Tokens of each sequence, prompt included."""


@dataclass(frozen=True)
class Batch:
    """One optimizer update. The second block is None until the learner has annotated it."""

    tokens_T: Tensor
    position_T: Tensor
    source_N: Tensor
    """Index into T of the hidden state that predicts the token."""
    target_N: Tensor
    sequence_N: Tensor
    rollout_logprob_N: Tensor
    rollout_S: Tensor
    """Index into R of each packed sequence."""
    length_S: Tensor
    """Trained tokens of each sequence."""
    counted_S: Tensor
    """Bool: false for a sequence that is in the baseline only (`mask_truncated`)."""
    reward_R: Tensor
    group_R: Tensor
    key_R: tuple[tuple[int, int, int], ...]
    """(ordinal of the draw, index in the group, row of the prompt) of each judged rollout."""
    sequences: int
    """S of the loss weights: judged rollouts that count, dropped ones included."""
    tokens: int
    """N of the loss weights: their policy tokens."""
    plan: tuple[Microbatch, ...]

    old_logprob_N: Tensor | None = None
    reference_logprob_N: Tensor | None = None
    advantage_R: Tensor | None = None
    advantage_N: Tensor | None = None
    weight_N: Tensor | None = None

    def to(self, device: torch.device, maths: torch.device) -> Batch:
        """What the model is given goes to its device, the rest to where the loss is computed."""
        seen = ("tokens_T", "position_T", "source_N", "target_N")
        moved: dict[str, Any] = {
            key: value.to(device if key in seen else maths)
            for key, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)


@dataclass(frozen=True)
class Batches:
    """The updates of one step. Empty ones are left out and counted."""

    updates: tuple[Batch, ...]
    skipped: int

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.updates)

    def __len__(self) -> int:
        return len(self.updates)


def make_batches(groups: Sequence[Group], row: Algorithm, max_tokens_per_microbatch: int) -> Batches:
    """Split a step's groups into `row.updates_per_step` updates by whole groups, then drop and pack.

    A group with fewer than two judged rollouts has no baseline and is left out, as is (when the algorithm
    allows it) one whose rewards agree. Raises RunError for a rollout whose history branches.
    """
    updates = [_pack(part, row, max_tokens_per_microbatch) for part in _split(groups, row.updates_per_step)]
    full = tuple(batch for batch in updates if batch is not None)
    return Batches(full, skipped=len(updates) - len(full))


def has_baseline(group: Group, row: Algorithm) -> bool:
    """True if this group's rewards can be compared: within it, or with the whole batch."""
    return len(group.judged) >= (1 if row.advantage == "batch_mean_std" else 2)


def has_signal(group: Group) -> bool:
    """True if the rewards of this group differ."""
    return carries_signal([_value(r) for r in group.judged])


def _split(groups: Sequence[Group], parts: int) -> list[list[Group]]:
    """Consecutive groups, as even as whole groups allow."""
    return [[groups[i] for i in part] for part in np.array_split(np.arange(len(groups)), parts)]


def _value(rollout: Rollout) -> float:
    assert rollout.reward is not None
    assert rollout.reward.value is not None
    return rollout.reward.value


def _pack(groups: list[Group], row: Algorithm, max_tokens: int) -> Batch | None:
    judged = [(g, r) for g in groups for r in g.judged if r.policy_tokens]
    counted = [not (row.mask_truncated and r.stop is Stop.LENGTH) for _, r in judged]
    alive = {g.ordinal for g in groups if has_baseline(g, row) and (has_signal(g) or not row.needs_signal)}
    in_reward = row.needs_reference and row.kl_in == "reward"  # then the baseline needs log-probabilities of all
    packed = [i for i, (g, _) in enumerate(judged) if g.ordinal in alive and (counted[i] or in_reward)]
    if not any(counted[i] for i in packed):
        return None
    # Sequences of like length share a micro-batch: inside attention they are padded to the longest.
    packed.sort(key=lambda i: -_tokens(*judged[i]))
    sequences = [_flatten(*judged[i]) for i in packed]
    lengths = [len(s.token_ids) for s in sequences]
    trained = [s.source for s in sequences]
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return Batch(
        tokens_T=_join([s.token_ids for s in sequences]),
        position_T=_join([np.arange(n) for n in lengths]),
        source_N=_join([s.source + start for s, start in zip(sequences, starts, strict=True)]),
        target_N=_join([s.token_ids[s.source + 1] for s in sequences]),
        sequence_N=_join([np.full(len(t), k) for k, t in enumerate(trained)]),
        rollout_logprob_N=torch.from_numpy(np.concatenate([s.logprobs for s in sequences])),
        rollout_S=torch.tensor(packed),
        length_S=torch.tensor([len(t) for t in trained]),
        counted_S=torch.tensor([counted[i] for i in packed]),
        reward_R=torch.tensor([_value(r) for _, r in judged], dtype=torch.float64),
        group_R=torch.tensor([g.ordinal for g, _ in judged]),
        key_R=tuple((g.ordinal, r.index, g.prompt.row) for g, r in judged),
        sequences=sum(counted),
        tokens=sum(r.policy_tokens for (_, r), c in zip(judged, counted, strict=True) if c),
        plan=_plan(lengths, [len(t) for t in trained], max_tokens),
    )


@dataclass(frozen=True)
class _Sequence:
    token_ids: np.ndarray
    """Prompt and answer."""
    source: np.ndarray
    """Positions whose next token the policy sampled."""
    logprobs: np.ndarray
    """Rollout log-probabilities of those tokens."""


def _tokens(group: Group, rollout: Rollout) -> int:
    return len(group.prompt.token_ids) + sum(len(s.token_ids) for s in rollout.segments)


def _flatten(group: Group, rollout: Rollout) -> _Sequence:
    for i, segment in enumerate(rollout.segments):
        if segment.parent != (i - 1 if i else None):
            raise RunError(
                f"row {group.prompt.row}, answer {rollout.index}: its history branches, which batches cannot hold yet"
            )
    prompt = group.prompt.token_ids
    mask = np.concatenate([s.policy_mask for s in rollout.segments])
    return _Sequence(
        token_ids=np.concatenate([prompt, *(s.token_ids for s in rollout.segments)]),
        source=np.flatnonzero(mask) + len(prompt) - 1,
        logprobs=np.concatenate([s.logprobs for s in rollout.segments])[mask].astype(np.float32),
    )


def _join(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _plan(lengths: list[int], trained: list[int], max_tokens: int) -> tuple[Microbatch, ...]:
    """Fill micro-batches in order up to the token budget; a sequence over the budget runs alone."""
    bounds = [0]
    used = 0
    for k, length in enumerate(lengths):
        if used and used + length > max_tokens:
            bounds.append(k)
            used = 0
        used += length
    bounds.append(len(lengths))
    token, target = np.cumsum([0, *lengths]), np.cumsum([0, *trained])
    return tuple(
        Microbatch(slice(token[a], token[b]), slice(target[a], target[b]), slice(a, b), tuple(lengths[a:b]))
        for a, b in pairwise(bounds)
    )
