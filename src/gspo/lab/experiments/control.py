"""`control` and `clip-fraction`: the same arms, read for two things."""

from __future__ import annotations

from gspo.lab.experiment import Experiment, Finding, Protocol
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
    WHY_LEARN,
    arm,
)
from gspo.lab.rules import Alike, ClipsMoreAndLearns

_FP32 = "full precision, lr 1e-4, 4 updates a step, 61 tokens"
_FP32_FAST = "full precision, lr 3e-4, 4 updates a step, 61 tokens"
_PLAIN_ARMS = (arm(_FP32, GRPO, steps=50, keys=GRPO_ROW), arm(_FP32, GSPO, steps=50, keys=GSPO_ROW))

CONTROL = Experiment(
    name="control",
    title="Where nothing is wrong, GRPO and GSPO learn alike",
    about="Engine and trainer compute in float32 with the same weights; four updates a step, at a learning rate that "
    "suits both. Nothing here gives a reason for one to be better. The paper's figure 1, on a large MoE, has GSPO ahead.",
    findings=(
        Finding(
            "In full precision, with a sane learning rate and four updates a step, GRPO and GSPO reach the same reward.",
            "lab",
            WHY_LEARN,
            Alike((_FP32, GSPO), (_FP32, GRPO), margin=CLOSE, gain=GAIN),
        ),
        Finding(
            "At three times that learning rate they still do.",
            "lab",
            WHY_LEARN,
            Alike((_FP32_FAST, GSPO), (_FP32_FAST, GRPO), margin=CLOSE, gain=GAIN),
            full_only=True,
        ),
    ),
    quick=Protocol(_PLAIN_ARMS, seeds=2),
    full=Protocol(
        (
            *_PLAIN_ARMS,
            arm(_FP32_FAST, GRPO, steps=50, keys=GRPO_ROW | FAST),
            arm(_FP32_FAST, GSPO, steps=50, keys=GSPO_ROW | FAST),
        ),
        seeds=3,
    ),
)

_MIDDLE = {"algorithm": "gspo", "algorithm.clip_low": 0.003, "algorithm.clip_high": 0.004}
CLIP_FRACTION = Experiment(
    name="clip-fraction",
    title="GSPO clips far more tokens, and still learns",
    about="The arms of `control`, read for what the clip takes: the share of tokens, of those with an advantage, that lose their gradient.",
    findings=(
        Finding(
            "GSPO clips over a hundred times as many tokens as GRPO and learns as well.",
            "paper, section 5.2, figure 2",
            f"two orders of magnitude are the paper's words; {WHY_LEARN}",
            ClipsMoreAndLearns((_FP32, GSPO), (_FP32, GRPO), times=100, margin=CLOSE, gain=GAIN),
        ),
    ),
    quick=Protocol(_PLAIN_ARMS, seeds=1),
    full=Protocol(
        (
            *_PLAIN_ARMS,
            arm(_FP32, "GSPO .003/.004", steps=50, keys=_MIDDLE),
            arm(_FP32, SIZED, steps=50, keys=SIZED_ROW),
        ),
        seeds=3,
    ),
)
