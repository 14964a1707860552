"""A group as a tree: its prompt stands once, and what each rollout went through hangs on it.

In: groups, and which of their rollouts are trained. Out: trees cut into micro-batches under a token budget, each laid
out as one packed row. `batch` calls it. Numpy only.

Letters: T tokens the model sees (packed), N trained tokens, L layers with experts, K experts chosen for a token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

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
    routes: tuple[np.ndarray, ...] | None
    """[tokens, L, K] of each segment, if the engine recorded them."""

    @property
    def tokens(self) -> int:
        return sum(len(ids) for ids in self.segments)


@dataclass(frozen=True)
class Tree:
    """A prompt and some of its answers."""

    prompt: np.ndarray
    answers: tuple[Answer, ...]
    homes: tuple[int, ...]
    """Number of the first token of the prompt, then of each answer, among all tokens of an update."""
    prompt_routes: np.ndarray | None

    @property
    def tokens(self) -> int:
        return len(self.prompt) + sum(a.tokens for a in self.answers)


@dataclass(frozen=True)
class Row:
    """Trees laid end to end: what goes through the model at once."""

    token_T: np.ndarray
    position_T: np.ndarray
    home_T: np.ndarray
    """Number of the token among all of the update, however it is cut: a prompt that is repeated keeps its own."""
    source_N: np.ndarray
    """Index into T."""
    routes_TLK: np.ndarray | None
    """Experts that the engine used, if it recorded them."""
    lengths: tuple[int, ...]
    """Tokens of each segment, prompts among them."""
    parents: tuple[int | None, ...]
    """Index of the segment that each continues; None for prompts."""


def tree(group: Group, rollouts: Sequence[Rollout], home: int = 0) -> Tree:
    """The tree of `rollouts`, each with policy tokens; `home` tokens of the update stand before it.

    Raises RunError for a segment that continues a later one, and for experts that were recorded of some tokens only.
    """
    answers = tuple(_answer(group, rollout) for rollout in rollouts)
    starts = np.cumsum([home + len(group.prompt.token_ids), *(a.tokens for a in answers)]).tolist()
    return Tree(group.prompt.token_ids, answers, (home, *starts[:-1]), group.prompt_routes)


def cut(trees: Sequence[Tree], max_tokens: int, together: int = 1) -> Iterator[list[Tree]]:
    """Fill micro-batches in order up to the token budget.

    A tree over the budget is split, its prompt repeated; an answer that with its prompt is over it goes alone. Of each
    tree, `together` answers in turn stay in one micro-batch: 2 where answers are compared in pairs.
    """
    filled: list[Tree] = []
    used = 0
    for whole in trees:
        for part in _split(whole, max_tokens, together):
            if filled and used + part.tokens > max_tokens:
                yield filled
                filled, used = [], 0
            filled.append(part)
            used += part.tokens
    yield filled


def _split(whole: Tree, max_tokens: int, together: int) -> Iterator[Tree]:
    first, used = 0, len(whole.prompt)
    for i in range(0, len(whole.answers), together):
        tokens = sum(answer.tokens for answer in whole.answers[i : i + together])
        if i > first and used + tokens > max_tokens:
            yield _part(whole, first, i)
            first, used = i, len(whole.prompt)
        used += tokens
    yield _part(whole, first, len(whole.answers))


def _part(whole: Tree, first: int, last: int) -> Tree:
    root, *homes = whole.homes
    return replace(whole, answers=whole.answers[first:last], homes=(root, *homes[first:last]))


def lay(trees: Sequence[Tree]) -> Row:
    """The packed row of a micro-batch."""
    tokens: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    homes: list[np.ndarray] = []
    parents: list[int | None] = []
    sources: list[np.ndarray] = []
    starts = [0]

    def add(ids: np.ndarray, first: int, home: int, parent: int | None) -> int:
        tokens.append(ids)
        positions.append(np.arange(first, first + len(ids)))
        homes.append(np.arange(home, home + len(ids)))
        parents.append(parent)
        starts.append(starts[-1] + len(ids))
        return len(tokens) - 1

    for each in trees:
        home, *answer_homes = each.homes
        root = add(each.prompt, 0, home, None)
        for answer, home in zip(each.answers, answer_homes, strict=True):
            place = [root]  # of the prompt, at _PROMPT + 1, then of each segment
            for ids, parent, depth in zip(answer.segments, answer.parents, answer.depths, strict=True):
                place.append(add(ids, len(each.prompt) + depth, home, place[parent + 1]))
                home += len(ids)
            segment_N = np.array(place)[answer.source_segment_N + 1]
            start, end = np.array(starts)[segment_N], np.array(starts)[segment_N + 1]
            offset_N = answer.source_offset_N
            sources.append(np.where(offset_N < 0, end + offset_N, start + offset_N))
    return Row(
        token_T=np.concatenate(tokens),
        position_T=np.concatenate(positions),
        home_T=np.concatenate(homes),
        source_N=np.concatenate(sources),
        routes_TLK=_routes(trees),
        lengths=tuple(len(ids) for ids in tokens),
        parents=tuple(parents),
    )


def _routes(trees: Sequence[Tree]) -> np.ndarray | None:
    if any(each.prompt_routes is None for each in trees):
        return None
    parts = [
        part for each in trees for part in (each.prompt_routes, *(r for a in each.answers for r in a.routes or ()))
    ]
    return np.concatenate([part for part in parts if part is not None])


# ------------------------------------------------------------------------------ one rollout


def _answer(group: Group, rollout: Rollout) -> Answer:
    _check_routes(group, rollout)
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
        routes=None
        if group.prompt_routes is None
        else tuple(routes[: needed[i]] for i in kept if (routes := segments[i].routes) is not None),
    )


def _check_routes(group: Group, rollout: Rollout) -> None:
    """Raise RunError where the experts of a token that is computed again would be missing."""
    where = f"row {group.prompt.row}, answer {rollout.index}"
    recorded = group.prompt_routes is not None
    for i, segment in enumerate(rollout.segments):
        if len(segment.token_ids) and (segment.routes is not None) != recorded:
            has, lacks = ("prompt", f"segment {i}") if recorded else (f"segment {i}", "prompt")
            raise RunError(
                f"{where}: its {has} has routes and its {lacks} has none: the engine has to record both or neither"
            )
    for i, segment in enumerate(rollout.segments):
        above = None if segment.parent is None or segment.parent >= i else rollout.segments[segment.parent]
        if above is not None and above.routes is not None and len(above.routes) < len(above.token_ids):
            raise RunError(
                f"{where}: segment {i} goes on where segment {segment.parent} ends, and that has {len(above.token_ids)} tokens and "
                f"routes of {len(above.routes)}"
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
            joined.append(replace(segment, parent=place[parent]))
        place[i] = len(joined) - 1
    return joined


def _continued(first: Segment, second: Segment) -> Segment:
    return Segment(
        np.concatenate([first.token_ids, second.token_ids]),
        np.concatenate([first.policy_mask, second.policy_mask]),
        np.concatenate([first.logprobs, second.logprobs]),
        first.parent,
        None if first.routes is None or second.routes is None else np.concatenate([first.routes, second.routes]),
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
