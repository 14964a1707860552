"""`identities`: gradients that must be equal."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.experiments.pinned import GSPO_ROW, arm
from gspo.lab.outcome import CONTROL, ON_POLICY, TOKEN
from gspo.lab.rules import GapsVanish

_GRADIENTS = ("gradients in float64, 31 tokens", "every row of the table")


def _arm(steps: int) -> Arm:
    keys = GSPO_ROW | {"model.dtype": "float64"}
    return arm(*_GRADIENTS, letters=5, steps=steps, program=("gspo.lab.identities",), keys=keys)


IDENTITIES = Experiment(
    name="identities",
    title="What must be equal is equal",
    about="At each update of a short run, the gradient of every algorithm's loss to all weights is taken on the same forward pass, "
    "with the same weights and advantages a token, before the optimizer. Distances are relative.",
    findings=(
        Finding(
            "With the same advantage for all tokens of an answer, GSPO-token is GSPO, off policy too.",
            "paper, equations 13-17",
            "in float64; 1e-6 is above the rounding of the engine's log-probabilities, which are float32",
            GapsVanish(_GRADIENTS, TOKEN, CONTROL, noise=1e-6, real=1e-2),
        ),
        Finding(
            "On policy, where every ratio is 1, all algorithms have the same gradient.",
            "lab",
            "as above",
            GapsVanish(_GRADIENTS, ON_POLICY, CONTROL, noise=1e-6, real=1e-2),
        ),
    ),
    quick=Protocol((_arm(steps=2),), seeds=1),
    full=Protocol((_arm(steps=4),), seeds=3),
)
