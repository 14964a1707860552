"""`moe-regime`: a search for routing that moves as training goes on, where the paper has Routing Replay matter."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.experiments.moe import R2, routed_rows
from gspo.lab.experiments.pinned import CLOSE, FAST, GAIN, GRPO, GSPO, GSPO_ROW, WHY_CLOSE, WHY_LEARN, Keys, arm
from gspo.lab.rules import Higher, NotWorse, Reaches, Shrinks

_REUSED = "fine MoE, 16 updates a step, lr 3e-4, 61 tokens"
_LARGE = "fine MoE, 4 updates a step, lr 1e-3, 86 tokens"
_BOTH = "fine MoE, 16 updates a step, lr 1e-3, 61 tokens"
_PAPER = "paper, section 5.3"


def _arms(setting: str, steps: int, keys: Keys, *, letters: int = 8) -> tuple[Arm, ...]:
    rows = routed_rows(GSPO, GSPO_ROW)
    return tuple(
        arm(setting, name, model="fine-moe", letters=letters, steps=steps, keys=row | keys)
        for name, row in rows.items()
    )


_SIXTEEN: Keys = FAST | {"algorithm.epochs": 4}
_STEEP: Keys = {"optimizer.learning_rate": 1e-3}

MOE_REGIME = Experiment(
    name="moe-regime",
    title="Finer experts, more layers, larger moves: does routing move, and does replay matter then",
    about="In `moe` less than one expert set in a hundred changes by training. Here the model has eight layers of 32 small experts, four for a token, "
    "so that a small change of the router is enough to change the set, and weights move further from the old policy: by 16 updates on each step's "
    "answers, by a larger learning rate on longer answers, or by both on the shorter ones. Engine and trainer have the same weights, so nothing but "
    "training moves the routing. Three steps of GRPO in the first two settings were run before the protocol was fixed, to see how long a step takes "
    "(they changed 4 to 10 % of the expert sets); the third setting was added then. No arm was run to its end before that.",
    findings=(
        Finding(
            "GRPO learns more with Routing Replay than without, under 16 updates a step.",
            f"{_PAPER}, figure 3",
            WHY_CLOSE,
            Higher((_REUSED, R2), (_REUSED, GRPO), CLOSE),
        ),
        Finding(
            "About 10 % of the expert sets change from the old policy to the new.",
            _PAPER,
            "the paper's number; a thousandth is all but nothing",
            Reaches((_REUSED, GRPO), "experts_update", 0.10),
        ),
        Finding(
            "Replaying the old policy's experts narrows the spread of the token log ratio.",
            _PAPER,
            "by a fifth under every seed, as in `moe`",
            Shrinks((_REUSED, R2), (_REUSED, GRPO), "ratio_tokens", 0.8),
        ),
        Finding(
            "GSPO without replay does as well as GRPO with it, under 16 updates a step.",
            _PAPER,
            WHY_LEARN,
            NotWorse((_REUSED, GSPO), (_REUSED, R2), CLOSE, GAIN),
        ),
        Finding(
            "At a learning rate of 1e-3 GRPO learns more with Routing Replay than without.",
            f"{_PAPER}, figure 3",
            WHY_CLOSE,
            Higher((_LARGE, R2), (_LARGE, GRPO), CLOSE),
            full_only=True,
        ),
        Finding(
            "At that rate GSPO without replay does as well as GRPO with it.",
            _PAPER,
            WHY_LEARN,
            NotWorse((_LARGE, GSPO), (_LARGE, R2), CLOSE, GAIN),
            full_only=True,
        ),
        Finding(
            "With both, GRPO learns more with Routing Replay than without.",
            f"{_PAPER}, figure 3",
            WHY_CLOSE,
            Higher((_BOTH, R2), (_BOTH, GRPO), CLOSE),
            full_only=True,
        ),
        Finding(
            "With both, GSPO without replay does as well as GRPO with it.",
            _PAPER,
            WHY_LEARN,
            NotWorse((_BOTH, GSPO), (_BOTH, R2), CLOSE, GAIN),
            full_only=True,
        ),
    ),
    quick=Protocol(_arms(_REUSED, 12, _SIXTEEN), seeds=1),
    full=Protocol(
        (
            *_arms(_REUSED, 40, _SIXTEEN),
            *_arms(_LARGE, 40, _STEEP, letters=10),
            *_arms(_BOTH, 40, _SIXTEEN | _STEEP),
        ),
        seeds=3,
    ),
)
