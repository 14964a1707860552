"""Groups in, packed batches out: one `Batch` for each optimizer update, with its micro-batch plan.

`train` calls `make_batches` once a step. The denominators of the loss are counted here, over every judged
rollout of the update, before anything without a gradient is dropped: so dropping is exact.

Letters: T tokens the model sees (packed), N trained tokens, S sequences packed, R judged rollouts of the update,
L layers with experts, K experts chosen for a token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gspo.algorithms.advantages import carries_signal
from gspo.presets import Algorithm
from gspo.trees import Row, Tree, cut, lay, tree
from gspo.types import Group, Rollout, Stop


@dataclass(frozen=True)
class Microbatch:
    """Trees that go through the model together: slices into the batch."""

    token: slice
    trained: slice
    sequence: slice
    lengths: tuple[int, ...]
    """Tokens of each segment, prompts among them."""
    parents: tuple[int | None, ...]
    """Index of the segment that each continues; None for prompts."""

    @property
    def sequences(self) -> int:
        return int(self.sequence.stop - self.sequence.start)


@dataclass(frozen=True)
class Batch:
    """One optimizer update. The second block is None until the learner has annotated it."""

    tokens_T: Tensor
    position_T: Tensor
    home_T: Tensor
    """Number of the token among all of the update: the same under any plan, and for every copy of a prompt."""
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
    unended_R: Tensor
    """Bool: the answer was cut at the length limit."""
    group_R: Tensor
    key_R: tuple[tuple[int, int, int], ...]
    """(ordinal of the draw, index in the group, row of the prompt) of each judged rollout."""
    sequences: int
    """S of the loss weights: judged rollouts that count, dropped ones included."""
    tokens: int
    """N of the loss weights: their policy tokens."""
    plan: tuple[Microbatch, ...]
    rollout_routes_TLK: Tensor | None
    """Experts that the engine used, if it recorded them."""

    old_logprob_N: Tensor | None = None
    reference_logprob_N: Tensor | None = None
    advantage_R: Tensor | None = None
    advantage_N: Tensor | None = None
    weight_N: Tensor | None = None
    value_N: Tensor | None = None
    """Value of the text before each token, by the critic before the step; with the two below, only where there is one."""
    return_N: Tensor | None = None
    """What its values are trained on."""
    outcome_N: Tensor | None = None
    """Discounted sum of the rewards from each token on, as they came."""
    old_routes_TLK: Tensor | None = None
    """Experts that the trainer's old policy chose, of a model with experts."""

    def to(self, device: torch.device, maths: torch.device) -> Batch:
        """What the model is given goes to its device, the rest to where the loss is computed."""
        seen = ("tokens_T", "position_T", "home_T", "source_N", "target_N", "rollout_routes_TLK", "old_routes_TLK")
        moved: dict[str, Any] = {
            key: value.to(device if key in seen else maths)
            for key, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        return replace(self, **moved)

    def with_plan_of(self, other: Batch) -> Batch:
        """This update cut as `other` is: the same rollouts in the same order, under another token budget."""
        return replace(
            self,
            tokens_T=other.tokens_T,
            position_T=other.position_T,
            home_T=other.home_T,
            source_N=other.source_N,
            plan=other.plan,
            rollout_routes_TLK=other.rollout_routes_TLK,
            old_routes_TLK=None if self.old_routes_TLK is None else self._at_home(self.old_routes_TLK)[other.home_T],
        )

    def copies(self) -> Tensor:
        """[T] how often each token stands in the batch: more than once in a prompt whose answers are in several micro-batches."""
        return torch.bincount(self.home_T)[self.home_T]

    def _at_home(self, x_T: Tensor) -> Tensor:
        """Rows in the order of `home_T`; of the copies of a prompt, which differ by rounding at most, any one."""
        rows = x_T.new_zeros(int(self.home_T.max()) + 1, *x_T.shape[1:])
        rows[self.home_T] = x_T
        return rows


@dataclass(frozen=True)
class Batches:
    """The updates of one step. Empty ones are left out and counted."""

    updates: tuple[Batch, ...]
    skipped: int
    largest: int
    """Tokens of the largest micro-batch: over the budget only where a single answer, with its prompt, is."""

    @property
    def divisible(self) -> bool:
        """False if every micro-batch holds a single answer."""
        return any(micro.sequences > 1 for batch in self.updates for micro in batch.plan)

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.updates)

    def __len__(self) -> int:
        return len(self.updates)


def make_batches(groups: Sequence[Group], row: Algorithm, max_tokens_per_microbatch: int) -> Batches:
    """Split a step's groups into `row.updates_per_step` updates by whole groups, then drop and pack.

    A group with fewer than two judged rollouts has no baseline and is left out, as is (when the algorithm
    allows it) one whose rewards agree. The order of rollouts and of their tokens does not depend on the token budget.
    Raises RunError for a rollout whose segments are no tree, and for one whose routes do not cover its tokens.
    """
    updates = [_pack(part, row, max_tokens_per_microbatch) for part in _split(groups, row.updates_per_step)]
    full = tuple(batch for batch in updates if batch is not None)
    largest = max((m.token.stop - m.token.start for batch in full for m in batch.plan), default=0)
    return Batches(full, skipped=len(updates) - len(full), largest=largest)


def has_baseline(group: Group, row: Algorithm) -> bool:
    """True if this group's rewards can be compared: within it, with the whole batch, or with a critic's values."""
    return len(group.judged) >= (1 if row.needs_critic or row.advantage == "batch_mean_std" else 2)


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
    # Where the KL is in the reward, a baseline made of the rewards needs the log-probabilities of all.
    in_reward = row.needs_reference and row.kl_in == "reward" and not row.needs_critic
    packed = [i for i, (g, _) in enumerate(judged) if g.ordinal in alive and (counted[i] or in_reward)]
    if not any(counted[i] for i in packed):
        return None
    of_group = [list(part) for _, part in groupby(packed, key=lambda i: judged[i][0].ordinal)]
    trees = _planted([(judged[part[0]][0], [judged[i][1] for i in part]) for part in of_group])
    reward_R = torch.tensor([_value(r) for _, r in judged], dtype=torch.float64)
    return _laid(list(cut(trees, max_tokens)), judged, packed=packed, counted=counted, reward_R=reward_R)


def answers_batch(groups: Sequence[Group], max_tokens_per_microbatch: int, together: int = 1) -> Batch:
    """One update on every answer of `groups`, whatever it is worth; `reward_R` is zeros. Each answer has policy tokens.

    `together`: so many answers of a group, in turn, are never cut apart.
    """
    given = [(g, r) for g in groups for r in g.rollouts]
    reward_R = torch.zeros(len(given), dtype=torch.float64)
    trees = _planted([(g, list(g.rollouts)) for g in groups])
    everyone, all_count = list(range(len(given))), [True] * len(given)
    parts = list(cut(trees, max_tokens_per_microbatch, together))
    return _laid(parts, given, packed=everyone, counted=all_count, reward_R=reward_R)


def _planted(answered: Sequence[tuple[Group, list[Rollout]]]) -> list[Tree]:
    """The trees of an update, each knowing how many tokens stand before it."""
    trees: list[Tree] = []
    for group, rollouts in answered:
        trees.append(tree(group, rollouts, sum(each.tokens for each in trees)))
    return trees


def _laid(
    parts: list[list[Tree]],
    known: list[tuple[Group, Rollout]],
    *,
    packed: list[int],
    counted: list[bool],
    reward_R: Tensor,
) -> Batch:
    """The batch of trees in micro-batches, which hold the answers `packed` of those `known`."""
    answers = [answer for part in parts for each in part for answer in each.answers]
    rows = [lay(part) for part in parts]
    first_T = np.cumsum([0, *(len(row.token_T) for row in rows)])
    length_S = [len(a.target_N) for a in answers]
    return Batch(
        tokens_T=_join([row.token_T for row in rows]),
        position_T=_join([row.position_T for row in rows]),
        home_T=_join([row.home_T for row in rows]),
        source_N=_join([row.source_N + first for row, first in zip(rows, first_T[:-1], strict=True)]),
        target_N=_join([a.target_N for a in answers]),
        sequence_N=torch.repeat_interleave(torch.tensor(length_S)),
        rollout_logprob_N=torch.from_numpy(np.concatenate([a.logprob_N for a in answers])),
        rollout_S=torch.tensor(packed),
        length_S=torch.tensor(length_S),
        counted_S=torch.tensor([counted[i] for i in packed]),
        reward_R=reward_R,
        unended_R=torch.tensor([r.stop is Stop.LENGTH for _, r in known]),
        group_R=torch.tensor([g.ordinal for g, _ in known]),
        key_R=tuple((g.ordinal, r.index, g.prompt.row) for g, r in known),
        sequences=sum(counted),
        tokens=sum(r.policy_tokens for (_, r), c in zip(known, counted, strict=True) if c),
        plan=_plan(parts, rows),
        rollout_routes_TLK=_routes(rows),
    )


def _join(parts: list[np.ndarray]) -> Tensor:
    return torch.from_numpy(np.concatenate(parts).astype(np.int64))


def _routes(rows: list[Row]) -> Tensor | None:
    found = [row.routes_TLK for row in rows if row.routes_TLK is not None]
    return torch.from_numpy(np.concatenate(found)) if len(found) == len(rows) else None


def _plan(parts: list[list[Tree]], rows: list[Row]) -> tuple[Microbatch, ...]:
    """Where each micro-batch lies in the batch."""
    answers = [[answer for each in part for answer in each.answers] for part in parts]
    token = np.cumsum([0, *(len(row.token_T) for row in rows)]).tolist()
    trained = np.cumsum([0, *(len(row.source_N) for row in rows)]).tolist()
    sequence = np.cumsum([0, *(len(a) for a in answers)]).tolist()
    return tuple(
        Microbatch(
            token=slice(token[i], token[i + 1]),
            trained=slice(trained[i], trained[i + 1]),
            sequence=slice(sequence[i], sequence[i + 1]),
            lengths=row.lengths,
            parents=row.parents,
        )
        for i, row in enumerate(rows)
    )
