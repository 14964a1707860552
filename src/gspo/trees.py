"""A group as a tree: its prompt stands once, and what each rollout went through hangs on it.

In: groups, and which of their rollouts are trained. Out: trees cut into micro-batches under a token budget, each laid
out as one packed row. `batch` calls it. Numpy only.

Letters: T tokens the model sees (packed), N trained tokens.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from gspo.errors import RunError
from gspo.types import Group, Rollout, Segment

_PROMPT = -1
"""In the place of a segment's index: the prompt."""


@dataclass(frozen=True)
class Answer:
    """What hangs on the prompt in one rollout, without the tokens whose hidden states predict nothing that is trained."""

    segments: tuple[np.ndarray, ...]
    """Token ids of each."""
    parents: tuple[int, ...]
    """Index of the segment that each continues, or `_PROMPT`."""
    depths: tuple[int, ...]
    """Position of each one's first token, counted from the end of the prompt."""
    source_segment_N: np.ndarray
    source_offset_N: np.ndarray
    """The token whose hidden state predicts the trained one: its segment (or `_PROMPT`) and place; -1 is the last."""
    target_N: np.ndarray
    logprob_N: np.ndarray
    """float32, of the distribution that was sampled."""

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.segments)


@dataclass(frozen=True)
class Tree:
    """A prompt and some of its answers."""

    prompt: np.ndarray
    answers: tuple[Answer, ...]

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(a.tokens for a in self.answers)


@dataclass(frozen=True)
class Row:
    """Trees laid end to end: what goes through the model at once."""

    token_T: np.ndarray
    position_T: np.ndarray
    source_N: np.ndarray
    """Index into T."""
    lengths: tuple[int, ...]
    """Tokens of each segment, prompts among them."""
    parents: tuple[int | None, ...]
    """Index of the segment that each continues; None for prompts."""


def tree(group: Group, rollouts: Sequence[Rollout]) -> Tree:
    """The tree of `rollouts`, each with policy tokens. Raises RunError for a segment that continues a later one."""
    return Tree(group.prompt.token_ids, tuple(_answer(group, rollout) for rollout in rollouts))


def cut(trees: Sequence[Tree], max_tokens: int) -> Iterator[list[Tree]]:
    """Fill micro-batches in order up to the token budget.

    A tree over the budget is split, its prompt repeated; an answer that with its prompt is over it goes alone.
    """
    filled: list[Tree] = []
    used = 0
    for whole in trees:
        for part in _split(whole, max_tokens):
            if filled and used + part.tokens > max_tokens:
                yield filled
                filled, used = [], 0
            filled.append(part)
            used += part.tokens
    yield filled


def _split(whole: Tree, max_tokens: int) -> Iterator[Tree]:
    part: list[Answer] = []
    used = len(whole.prompt)
    for answer in whole.answers:
        if part and used + answer.tokens > max_tokens:
            yield Tree(whole.prompt, tuple(part))
            part, used = [], len(whole.prompt)
        part.append(answer)
        used += answer.tokens
    yield Tree(whole.prompt, tuple(part))


def lay(trees: Sequence[Tree]) -> Row:
    """The packed row of a micro-batch."""
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    parents: list[int | None] = []
    sources: list[np.ndarray] = []
    starts = [0]

    def add(ids: np.ndarray, first: int, parent: int | None) -> int:
        tokens.append(ids)
        positions.append(np.arange(first, first + len(ids)))
        parents.append(parent)
        starts.append(starts[-1] + len(ids))
        return len(tokens) - 1

    for each in trees:
        root = add(each.prompt, 0, None)
        for answer in each.answers:
            place = [root]  # of the prompt, at _PROMPT + 1, then of each segment
            for ids, parent, depth in zip(answer.segments, answer.parents, answer.depths, strict=True):
                place.append(add(ids, len(each.prompt) + depth, place[parent + 1]))
            segment_N = np.array(place)[answer.source_segment_N + 1]
            start, end = np.array(starts)[segment_N], np.array(starts)[segment_N + 1]
            offset_N = answer.source_offset_N
            sources.append(np.where(offset_N < 0, end + offset_N, start + offset_N))
    return Row(
        token_T=np.concatenate(tokens),
        position_T=np.concatenate(positions),
        source_N=np.concatenate(sources),
        lengths=tuple(len(ids) for ids in tokens),
        parents=tuple(parents),
    )


# ------------------------------------------------------------------------------ one rollout


def _answer(group: Group, rollout: Rollout) -> Answer:
    segments = _joined(group, rollout)
    needed = _needed(segments)
    place = {_PROMPT: _PROMPT}  # of the segments that stay
    depth = {_PROMPT: 0}
    for i, segment in enumerate(segments):
        parent = _PROMPT if segment.parent is None else segment.parent
        depth[i] = depth[parent] + (0 if parent == _PROMPT else len(segments[parent].token_ids))
        if needed[i]:
            place[i] = len(place) - 1
    kept = [i for i in range(len(segments)) if needed[i]]
    source_segment, source_offset = [], []
    for i, segment in enumerate(segments):
        trained = np.flatnonzero(segment.policy_mask)
        before = place.get(_PROMPT if segment.parent is None else segment.parent, _PROMPT)
        source_segment.append(np.where(trained > 0, place.get(i, _PROMPT), before))
        source_offset.append(trained - 1)
    return Answer(
        segments=tuple(segments[i].token_ids[: needed[i]] for i in kept),
        parents=tuple(place[_PROMPT if (p := segments[i].parent) is None else p] for i in kept),
        depths=tuple(depth[i] for i in kept),
        source_segment_N=np.concatenate(source_segment),
        source_offset_N=np.concatenate(source_offset),
        target_N=np.concatenate([s.token_ids[s.policy_mask] for s in segments]),
        logprob_N=np.concatenate([s.logprobs[s.policy_mask] for s in segments]).astype(np.float32),
    )


def _joined(group: Group, rollout: Rollout) -> list[Segment]:
    """The rollout's segments without empty ones, each run of them that no branch leaves made into one."""
    above: list[int | None] = []  # the nearest segment above that has tokens
    for i, segment in enumerate(rollout.segments):
        parent = segment.parent
        if parent is not None and not 0 <= parent < i:
            raise RunError(
                f"row {group.prompt.row}, answer {rollout.index}: segment {i} continues segment {parent}, which does not come before it"
            )
        above.append(parent if parent is None or len(rollout.segments[parent].token_ids) else above[parent])
    filled = [i for i, segment in enumerate(rollout.segments) if len(segment.token_ids)]
    children = Counter(above[i] for i in filled)
    joined: list[Segment] = []
    place: dict[int | None, int | None] = {None: None}
    for i in filled:
        segment, parent = rollout.segments[i], above[i]
        if parent is not None and children[parent] == 1 and place[parent] == len(joined) - 1:
            joined[-1] = _continued(joined[-1], segment)
        else:
            joined.append(Segment(segment.token_ids, segment.policy_mask, segment.logprobs, place[parent]))
        place[i] = len(joined) - 1
    return joined


def _continued(first: Segment, second: Segment) -> Segment:
    return Segment(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.policy_mask, second.policy_mask]),
        np.concatenate([first.logprobs, second.logprobs]),
        first.parent,
    )


def _needed(segments: Sequence[Segment]) -> list[int]:
    """Tokens of each segment that the model has to see: all of them below which something is trained, else those before
    the last trained one."""
    needed = [0] * len(segments)
    continued = [False] * len(segments)
    for i in reversed(range(len(segments))):
        segment = segments[i]
        trained = np.flatnonzero(segment.policy_mask)
        needed[i] = len(segment.token_ids) if continued[i] else int(trained[-1]) if len(trained) else 0
        if segment.parent is not None and (continued[i] or len(trained)):
            continued[segment.parent] = True
    return needed
