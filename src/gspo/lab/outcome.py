"""What one arm of an experiment came to, read from the journal of its run.

In: the lines of a journal. Out: an `Outcome`, the numbers that rules decide by, and `Curves`, what the report draws.
`arms` makes both when an arm has ended, and keeps them as JSON. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

WINDOW = 10
"""Steps of a smoothed reward: the last so many are the final reward, the best so many in a row the peak."""
_START = 3
"""Steps that the reward before learning is read from. Weights move little in them: the step size is warmed up."""

ON_POLICY, TOKEN, CONTROL = "on-policy ", "gspo_token", "control"
"""Names, or the first word of names, of distances between gradients; `identities` measures them."""

Lines = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Measure:
    """A number of each step that the report draws and tabulates."""

    name: str
    key: str
    """In the journal."""
    label: str
    log: bool = False
    """Drawn on a logarithmic axis."""
    noise: float = 0.0
    """Where it stays below this it is rounding, and not drawn."""


MEASURES = (
    Measure("reward", "reward/mean", "reward"),
    Measure("clip_tokens", "clip/tokens", "share of tokens that the clip took", log=True),
    Measure("ratio_tokens", "ratio/std_tokens", "ratio spread: std of the token log ratio", log=True),
    Measure("ratio_rows", "ratio/std_rows", "ratio spread: std of the answer's mean log ratio", log=True),
    Measure("parity", "parity/mean", "parity: mean |log p trainer - log p engine|", log=True),
    Measure("parity_signed", "parity/signed", "parity, signed: mean log ratio trainer / engine", noise=1e-5),
    Measure(
        "experts_rollout", "routing/changed_rollout_old", "expert sets that differ, engine to old policy", log=True
    ),
    Measure("experts_update", "routing/changed_old_new", "expert sets that differ, old policy to new", log=True),
    Measure("entropy", "entropy", "entropy, nats a token"),
)


@dataclass(frozen=True)
class Outcome:
    """The numbers of one arm under one seed. Rewards lie in [0, 1]."""

    steps: int
    start: float
    """Mean reward of the first 3 steps."""
    final: float
    """Mean reward of the last 10 steps."""
    area: float
    """Mean reward of all steps: the area under the curve, over its width."""
    peak: float
    """Highest mean of 10 steps in a row."""
    means: Mapping[str, float]
    """Mean over the steps of each of `MEASURES` that was measured."""
    gaps: Mapping[str, float] = field(default_factory=dict)
    """Only of the experiment `identities`: distances between gradients, by name."""
    rollouts: int = 0
    seconds: float = 0.0
    """Of the steps, evaluation left out: wall clock, on whatever else the machine did."""

    @property
    def collapsed(self) -> bool:
        """The reward fell by half: from its peak, or from where it started."""
        return self.final < 0.5 * max(self.peak, self.start)


@dataclass(frozen=True)
class Curves:
    """One number a step."""

    rollouts: tuple[int, ...]
    """Answers sampled up to and with the step."""
    seconds: tuple[float, ...]
    """Time up to and with the step."""
    values: Mapping[str, tuple[float | None, ...]]
    """By name of the measure; None where a step had nothing to measure."""


def outcome_of(lines: Lines, gaps: Mapping[str, float] | None = None) -> Outcome:
    """The numbers of a run. A step without a judged answer has no reward, and is left out of the means.

    Raises:
        ValueError: no step was judged.
    """
    rewards = [line["reward/mean"] for line in lines if line["reward/mean"] is not None]
    if not rewards:
        raise ValueError("no answer of the run was judged")
    curves = curves_of(lines)
    present = {name: [v for v in values if v is not None] for name, values in curves.values.items()}
    return Outcome(
        steps=len(lines),
        start=fmean(rewards[:_START]),
        final=fmean(rewards[-WINDOW:]),
        area=fmean(rewards),
        peak=max(trailing(rewards, WINDOW)[min(WINDOW, len(rewards)) - 1 :]),
        means={name: fmean(values) for name, values in present.items() if values},
        gaps=dict(gaps or {}),
        rollouts=curves.rollouts[-1],
        seconds=curves.seconds[-1],
    )


def curves_of(lines: Lines) -> Curves:
    """Every measure at every step, beside the rollouts and seconds that led there."""
    rollouts, seconds = [0], [0.0]
    for line in lines:
        rollouts.append(rollouts[-1] + line["rollouts/total"])
        seconds.append(seconds[-1] + line["time/step"] - line.get("time/eval", 0.0))
    return Curves(
        rollouts=tuple(rollouts[1:]),
        seconds=tuple(seconds[1:]),
        values={m.name: tuple(line.get(m.key) for line in lines) for m in MEASURES},
    )


def trailing(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value with up to `width - 1` before it."""
    return [fmean(values[max(0, i + 1 - width) : i + 1]) for i in range(len(values))]
