"""A small experiment of real arms: two algorithms on the recipe `tiny`, untrained, seconds each."""

from __future__ import annotations

from gspo.lab.experiment import Arm, Experiment, Finding, Protocol
from gspo.lab.rules import Alike, Higher

SETTING = "two steps of tiny"
_WORDS = (
    "threads=1",
    "prompts_per_step=4",
    "group_size=4",
    "eval.every=0",
    "guard=off",
    "model.dtype=float32",
    "reward=regex:[0-9]",
)


def arm(name: str, *words: str, steps: int = 2) -> Arm:
    return Arm(SETTING, name, (*_WORDS, f"steps={steps}", *words), recipe="tiny")


def experiment(*arms: Arm, name: str = "small", seeds: int = 1) -> Experiment:
    """The first two arms are compared."""
    a, b = (each.key for each in arms[:2])
    protocol = Protocol(arms, seeds)
    return Experiment(
        name=name,
        title="Two small arms",
        about="To try the lab.",
        findings=(
            Finding("They end alike.", "here", "1 is the whole range", Alike(a, b, margin=1.0, gain=-1.0)),
            Finding("The first is ahead.", "here", "2 cannot be", Higher(a, b, margin=2.0)),
        ),
        quick=protocol,
        full=protocol,
    )
