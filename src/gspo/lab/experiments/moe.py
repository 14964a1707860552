"""`moe`: Mixture-of-Experts, with and without Routing Replay."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.experiments.pinned import (
    CLOSE,
    FAST,
    GAIN,
    GRPO,
    GRPO_ROW,
    GSPO,
    GSPO_ROW,
    SIZED,
    SIZED_ROW,
    WHY_CLOSE,
    WHY_LEARN,
    Keys,
    arm,
)
from gspo.lab.rules import Higher, NotWorse, Reaches, Shrinks

_MOE = "MoE, full precision, lr 3e-4, 61 tokens"
_MOE_FP8 = "MoE, engine in fp8, lr 1e-4, 61 tokens"
R2, R3 = "GRPO, replay R2", "GRPO, replay R3"


def routed_rows(gspo: str, row: Keys) -> dict[str, Keys]:
    """GRPO without replay and with both kinds, and GSPO (called `gspo`, with the keys of `row`) without."""
    return {
        GRPO: GRPO_ROW | {"algorithm.routing": "off"},
        R2: GRPO_ROW | {"algorithm.routing": "old"},
        R3: GRPO_ROW | {"algorithm.routing": "rollout"},
        gspo: row | {"algorithm.routing": "off"},
    }


def _routed(setting: str, steps: int, keys: Keys, gspo: str, row: Keys) -> tuple[Arm, ...]:
    rows = routed_rows(gspo, row)
    return tuple(arm(setting, name, model="tiny-moe", steps=steps, keys=r | keys) for name, r in rows.items())


def _moe_arms(steps: int) -> tuple[Arm, ...]:
    mismatch: Keys = {"engine.weights": "fp8", "algorithm.anchor": "rollout"}
    return (
        *_routed(_MOE, steps, FAST, GSPO, GSPO_ROW),
        *_routed(_MOE_FP8, steps, mismatch, SIZED, SIZED_ROW),
    )


MOE = Experiment(
    name="moe",
    title="Mixture-of-Experts, with and without Routing Replay",
    about="A small MoE model, in full precision and with an engine in fp8, whose rounding also changes which experts it chooses. "
    "Replay R2 forces the old policy's experts on the updates, R3 those that the engine chose.",
    findings=(
        Finding(
            "GRPO on an MoE model learns properly only with Routing Replay.",
            "paper, section 5.3, figure 3",
            WHY_CLOSE,
            Higher((_MOE, R2), (_MOE, GRPO), CLOSE),
        ),
        Finding(
            "GSPO without replay does as well as GRPO with it.",
            "paper, section 5.3",
            WHY_LEARN,
            NotWorse((_MOE, GSPO), (_MOE, R2), CLOSE, GAIN),
        ),
        Finding(
            "About 10 % of the expert sets change from the old policy to the new.",
            "paper, section 5.3",
            "the paper's number; a thousandth is all but nothing",
            Reaches((_MOE, GRPO), "experts_update", 0.10),
        ),
        Finding(
            "With an engine in fp8, replaying its experts narrows the spread of the token log ratio.",
            "paper, section 5.3",
            "by a fifth under every seed: the prototype saw .061 become .048",
            Shrinks((_MOE_FP8, R3), (_MOE_FP8, GRPO), "ratio_tokens", 0.8),
        ),
        Finding(
            "With an engine in fp8, replaying its experts makes GRPO learn more.",
            "paper, section 5.3",
            WHY_CLOSE,
            Higher((_MOE_FP8, R3), (_MOE_FP8, GRPO), CLOSE),
        ),
    ),
    quick=Protocol(_moe_arms(25), seeds=1),
    full=Protocol(_moe_arms(50), seeds=3),
)
