"""What a step is trained on: prompts drawn, answered and judged, those without signal replaced by new ones.

In: the sampler, and what answers and judges. Out: `Drawn`. `job` calls `draw` for each step and `ahead` keeps what waits
for its step. This is DAPO's dynamic sampling (arXiv 2503.14476, section 3.2), with a bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gspo.batch import has_baseline, has_signal
from gspo.presets import Algorithm
from gspo.tasks.sampler import Draw, Sampler
from gspo.types import Group, Stop


@dataclass(frozen=True)
class Drawn:
    """A step's groups, and what was drawn beside them."""

    groups: list[Group]
    """`prompts_per_step` of them: what is trained on, and what S and N of the loss count."""
    replaced: tuple[Group, ...] = ()
    """Groups without signal that others stand in the place of, in the order of their draws; the loss knows nothing of them."""
    skipped: int = 0
    """Turns of prompts that were passed over for their difficulty."""


class Answer(Protocol):
    """Engine and reward: a judged group for each draw, in order."""

    def __call__(self, draws: Sequence[Draw]) -> list[Group]: ...


def draw(sampler: Sampler, answer: Answer, row: Algorithm, *, prompts: int, solved: float) -> Drawn:
    """The groups of a step, drawn in at most 1 + `row.resample` rounds.

    Each further round draws as many prompts as there are groups that nothing can be learnt from, and puts each group in
    the place of one of these; so every group with signal is trained on, and the step has `prompts` groups whatever comes.
    What the last round leaves without signal stays.

    Args:
        solved: the reward from which an answer counts as solved; the sampler is told the share of such answers.
    """
    before = sampler.skipped
    groups: list[Group] = []
    replaced: list[Group] = []
    open_places = list(range(prompts))
    for _ in range(1 + row.resample):
        new = answer(sampler.take(len(open_places)))
        for group in new:
            _tell(sampler, group, solved)
        if groups:
            replaced += [groups[place] for place in open_places]
            for place, group in zip(open_places, new, strict=True):
                groups[place] = group
        else:
            groups = new
        open_places = [place for place, group in enumerate(groups) if not teaches(group, row)]
        if not open_places:
            break
    return Drawn(groups, tuple(replaced), sampler.skipped - before)


def teaches(group: Group, row: Algorithm) -> bool:
    """True if its rewards can be compared and differ, and an answer of it counts in the loss."""
    counted = any(not (row.mask_truncated and r.stop is Stop.LENGTH) for r in group.judged)
    return has_baseline(group, row) and has_signal(group) and counted


def _tell(sampler: Sampler, group: Group, solved: float) -> None:
    values = [r.reward.value for r in group.judged if r.reward is not None and r.reward.value is not None]
    if values:
        sampler.learn(group.prompt.row, sum(value >= solved for value in values) / len(values))
