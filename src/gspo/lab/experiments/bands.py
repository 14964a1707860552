"""`bands`: a clip band sized from the measured mismatch, beside bands that are fixed."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.experiments.pinned import (
    APART,
    CLOSE,
    GAIN,
    GSPO,
    GSPO_ROW,
    SIZED,
    SIZED_ROW,
    WHY_APART,
    WHY_LEARN,
    Keys,
    arm,
)
from gspo.lab.rules import Higher, NotWorse

_AUTO = "GSPO, auto"
_FP8 = "fresh seeds: engine in fp8, lr 1e-4, 86 tokens"
_SAME = "fresh seeds: full precision, lr 1e-4, 61 tokens"


def _arms(setting: str, keys: Keys, *, steps: int, letters: int = 8) -> tuple[Arm, ...]:
    auto: Keys = GSPO_ROW | {"algorithm.clip_low": "auto", "algorithm.clip_high": "auto"}
    rows: dict[str, Keys] = {GSPO: GSPO_ROW, SIZED: SIZED_ROW, _AUTO: auto}
    rollout: Keys = {"algorithm.anchor": "rollout"}
    return tuple(
        arm(setting, name, letters=letters, steps=steps, keys=row | keys | rollout) for name, row in rows.items()
    )


_FP8_ARMS = _arms(_FP8, {"engine.weights": "fp8"}, steps=50, letters=10)

BANDS = Experiment(
    name="bands",
    title="A clip band sized from the mismatch of each step",
    about="`clip_low=auto` widens GSPO's band to twice what nine tenths of a step's answers stay within before any update, and never narrows "
    "it below the paper's. Its rule was written before these runs, and its seeds are used by no other experiment. "
    "The ratio's denominator is the engine's log-probability in all arms. With answers four steps old, whose distance is the lag's and not the engine's, it "
    "collapsed under three of three seeds (0.043, against 0.503 with .02/.027), and `max_staleness` beside it is refused since.",
    findings=(
        Finding(
            "With an engine in fp8, a band sized from the mismatch does as well as .02/.027, which was chosen by hand.",
            "lab",
            WHY_LEARN,
            NotWorse((_FP8, _AUTO), (_FP8, SIZED), CLOSE, GAIN),
        ),
        Finding(
            "With an engine in fp8, it is ahead of the paper's band.",
            "lab",
            WHY_APART,
            Higher((_FP8, _AUTO), (_FP8, GSPO), APART),
        ),
        Finding(
            "Where engine and trainer agree, it does as well as the paper's band.",
            "lab",
            WHY_LEARN,
            NotWorse((_SAME, _AUTO), (_SAME, GSPO), CLOSE, GAIN),
            full_only=True,
        ),
    ),
    quick=Protocol(_FP8_ARMS, seeds=1, first=100),
    full=Protocol((*_FP8_ARMS, *_arms(_SAME, {}, steps=50)), seeds=3, first=100),
)
