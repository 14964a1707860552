"""`efficiency`: reward against answers and time, each algorithm at its best learning rate."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.experiments.pinned import arm
from gspo.lab.rules import BestHigher

_ROWS = {
    "GSPO": "gspo",
    "GRPO": "grpo",
    "Dr. GRPO": "dr_grpo",
    "DAPO": "dapo",
    "SAPO": "sapo",
    "CISPO": "cispo",
    "LUSPO": "luspo",
}


def _sweep(rates: tuple[float, ...], steps: int) -> tuple[Arm, ...]:
    return tuple(
        arm(_at(rate), name, steps=steps, keys={"algorithm": row, "optimizer.learning_rate": rate})
        for rate in rates
        for name, row in _ROWS.items()
    )


def _at(rate: float) -> str:
    return f"lr {rate:.0e}".replace("e-0", "e-")


_QUICK_RATES, _RATES = (1e-4, 3e-4), (5e-5, 1e-4, 3e-4)
_VARIANTS = {name: tuple((_at(rate), name) for rate in _RATES) for name in _ROWS}

EFFICIENCY = Experiment(
    name="efficiency",
    title="Reward against answers sampled, and against time",
    about="Full precision, four updates a step, answers of 61 tokens. Every algorithm at each learning rate of a small sweep; each is then shown at the rate at which its mean reward was highest. "
    "The rate is chosen on the seeds that are shown, for all algorithms in the same way.",
    findings=(
        Finding(
            "GSPO reaches a higher reward than GRPO with the same number of answers, each at its best learning rate.",
            "paper, section 5.1, figure 1",
            "on the mean reward of all steps, over more answers than the final reward; .03 is what final rewards spread by over seeds",
            BestHigher(_VARIANTS["GSPO"], _VARIANTS["GRPO"], margin=0.03, measure="area"),
        ),
    ),
    quick=Protocol(_sweep(_QUICK_RATES, 25), seeds=1),
    full=Protocol(_sweep(_RATES, 50), seeds=3),
    contest=tuple(_VARIANTS.values()),
)
