"""What the arms of all experiments share: the task, the pinned settings, the algorithms, and the margins of the rules.

In: nothing. Out: `arm`, constants. The experiments are made of them. No torch.

Rules and thresholds stand here and in the experiments before a run is made; a threshold is given with its reason.
"The paper" is GSPO, arXiv 2507.18071. The task is `sort`: a prompt of N letters, the answer an insertion sort written
out, its letters taken in random order; the reward is 1 if the last list is right. N = 5, 8, 10 make answers of 31, 61 and
86 tokens. The models start partly trained. A prototype of this lab, on models of its own, chose the settings; where it
chose after a failure, it is said.
"""

from __future__ import annotations

from typing import Any

from gspo.lab.experiment import TRAIN, Arm

Keys = dict[str, Any]
"""Dotted settings."""

_SPREAD = "final rewards of the prototype's arms spread by about .03 over seeds"
CLOSE = 0.05
APART = 0.10
GAIN = 0.10
WHY_CLOSE = f"{_SPREAD}; a difference of .05 in the median, with the same sign under every seed, is more than that"
WHY_LEARN = f"{WHY_CLOSE}; an arm that gains less than .10 has not learned"
WHY_APART = f"{_SPREAD}; .10 is three times that"

# Every setting that a result hangs on is pinned here, also where it is the default.
_BASE: Keys = {
    "model.dtype": "float32",
    "model.device": "cpu",
    "threads": 1,
    "prompts_per_step": 16,
    "group_size": 8,
    "max_tokens_per_microbatch": 2048,
    "sampling.temperature": 1.0,
    "sampling.max_rows": 128,
    "optimizer.learning_rate": 1e-4,
    "optimizer.warmup_updates": 10,
    "optimizer.schedule": "constant",
    "optimizer.weight_decay": 0.0,
    "optimizer.betas": [0.9, 0.95],
    "optimizer.max_grad_norm": 1.0,
    "guard": "off",  # an arm that collapses is to be seen to
    "eval.every": 0,
    "checkpoint.every": 25,
    "checkpoint.keep": 1,
}

GRPO_ROW: Keys = {"algorithm": "grpo"}
GSPO_ROW: Keys = {"algorithm": "gspo"}
SIZED_ROW: Keys = {"algorithm": "gspo", "algorithm.clip_low": 0.02, "algorithm.clip_high": 0.027}
UNCLIPPED_ROW: Keys = {
    "algorithm.name": "grpo_unclipped",
    "algorithm.ratio": "token",
    "algorithm.gate": "none",
    "algorithm.aggregation": "sequence_mean",
    "algorithm.advantage": "group_mean_std",
}
GRPO, GSPO, SIZED, UNCLIPPED = "GRPO", "GSPO", "GSPO .02/.027", "GRPO without clip"
FAST: Keys = {"optimizer.learning_rate": 3e-4}
RECOMPUTED = "GRPO, recomputed"


def tokens(letters: int) -> int:
    """Length of a right answer, its end token included."""
    return letters * (letters + 1) // 2 + 3 * letters + 1


def arm(
    setting: str,
    name: str,
    *,
    steps: int,
    keys: Keys,
    letters: int = 8,
    model: str = "tiny-dense",
    program: tuple[str, ...] = TRAIN,
) -> Arm:
    """An arm of the lab: the pinned settings, and `keys` over them."""
    words = {
        "model.name": model,
        "data.source": f"sort:{letters}",
        "sampling.max_new_tokens": tokens(letters),
        "steps": steps,
        **_BASE,
        **keys,
    }
    return Arm(setting, name, tuple(f"{key}={value}" for key, value in words.items()), program=program)
