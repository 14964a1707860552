"""`reuse`: answers that are used often, or late."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.experiments.pinned import (
    CLOSE,
    FAST,
    GRPO,
    GRPO_ROW,
    GSPO,
    GSPO_ROW,
    SIZED,
    SIZED_ROW,
    UNCLIPPED,
    UNCLIPPED_ROW,
    WHY_CLOSE,
    Keys,
    arm,
)
from gspo.lab.rules import Collapses, Higher

_REUSE = "16 updates a step (4 passes), lr 3e-4, 61 tokens"
_REUSE_MORE = "32 updates a step (8 passes), lr 3e-4, 61 tokens"
_STALE = "answers 4 steps old, lr 3e-4, 61 tokens"


def _reused(setting: str, epochs: int, steps: int) -> tuple[Arm, ...]:
    rows: dict[str, Keys] = {GRPO: GRPO_ROW, GSPO: GSPO_ROW, SIZED: SIZED_ROW, UNCLIPPED: UNCLIPPED_ROW}
    keys: Keys = FAST | {"algorithm.epochs": epochs}
    return tuple(arm(setting, name, steps=steps, keys=row | keys) for name, row in rows.items())


def _staled(steps: int) -> tuple[Arm, ...]:
    rows: dict[str, Keys] = {GRPO: GRPO_ROW, GSPO: GSPO_ROW, SIZED: SIZED_ROW}
    keys: Keys = FAST | {"max_staleness": 4, "algorithm.anchor": "rollout"}
    return tuple(arm(_STALE, name, steps=steps, keys=row | keys) for name, row in rows.items())


REUSE = Experiment(
    name="reuse",
    title="Answers used often, or late",
    about="The policy that is trained moves away from the one that wrote the answers: 16 and 32 updates on each step's answers, or "
    "answers written by weights four steps old, whose log-probabilities are the ratio's denominator. The band .02/.027 is that of `precision`.",
    findings=(
        Finding(
            "Under 16 updates a step GSPO learns more than GRPO.",
            "paper, section 5.1: stable where GRPO is not",
            WHY_CLOSE,
            Higher((_REUSE, GSPO), (_REUSE, GRPO), CLOSE),
        ),
        Finding(
            "So does GSPO with the band .02/.027.",
            "lab",
            WHY_CLOSE,
            Higher((_REUSE, SIZED), (_REUSE, GRPO), CLOSE),
        ),
        Finding(
            "Without its clip, GRPO collapses under 16 updates a step.",
            "lab",
            "collapsed: the final reward is less than half of the peak or of the start",
            Collapses((_REUSE, UNCLIPPED)),
        ),
        Finding(
            "On answers four steps old GSPO learns more than GRPO.",
            "lab",
            WHY_CLOSE,
            Higher((_STALE, GSPO), (_STALE, GRPO), CLOSE),
        ),
        Finding(
            "Under 32 updates a step GSPO learns more than GRPO.",
            "lab",
            WHY_CLOSE,
            Higher((_REUSE_MORE, GSPO), (_REUSE_MORE, GRPO), CLOSE),
            full_only=True,
        ),
    ),
    quick=Protocol((*_reused(_REUSE, 4, 30), *_staled(40)), seeds=1),
    full=Protocol((*_reused(_REUSE, 4, 50), *_reused(_REUSE_MORE, 8, 30), *_staled(100)), seeds=3),
)
