"""What a run says on the terminal: the plan before it starts, then one line a step.

Plain lines on any terminal or log file; `job` holds one `Console` and gives it the journal's numbers.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TextIO

from gspo.config import Run
from gspo.heartbeat import Heartbeat

_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 24


def plan(run: Run) -> str:
    """The batch arithmetic of a run in one sentence."""
    prompts, answers = run.prompts_per_step, run.group_size
    updates, epochs = run.algorithm.updates_per_step, run.algorithm.epochs
    base, more = divmod(prompts, updates)
    sizes = " and ".join(str(n * answers) for n in dict.fromkeys([base + 1 if more else base, base]))
    again = f", {epochs} times over" if epochs > 1 else ""
    return (
        f"{prompts} prompts x {answers} answers = {prompts * answers} rollouts a step; "
        f"{updates} update{'s' * (updates > 1)} of {sizes} answers, by whole groups{again}; micro-batches of up to "
        f"{run.max_tokens_per_microbatch} tokens; {run.steps} steps, {run.steps * updates * epochs} updates in all"
    )


class Console:
    """Lines to a terminal or a file."""

    def __init__(self, steps: int, stream: TextIO | None = None) -> None:
        self._steps = steps
        self._stream = stream or sys.stdout
        self._rewards: list[float] = []
        self._seconds: list[float] = []
        self._crashed = False
        self._said: tuple[str, bool] | None = None
        self.heartbeat = Heartbeat(self.say)

    def say(self, text: str) -> None:
        with suppress(OSError):  # whoever read the lines has gone, a pipe or a terminal; the journal has them all
            print(text, file=self._stream, flush=True)

    def say_aside(self, folder: Path | None) -> None:
        """Say where the journal has put what it found past the step that the run goes on from."""
        if folder is not None:
            self.say(f"what had been done past the step that the run goes on from is set aside in {folder}")

    def step(self, m: dict[str, Any]) -> None:
        """The step's line; the verdict beneath it when it turns into something to know."""
        if m["reward/mean"] is not None:
            self._rewards.append(m["reward/mean"])
        self._seconds.append(m["time/step"])
        clipped = "clip/rows" if m["ratio"].startswith("sequence") else "clip/tokens"
        unit = "answers" if clipped == "clip/rows" else "tokens"
        parts = [
            f"step {m['step']:>{len(str(self._steps))}}/{self._steps}",
            f"reward {_number(m['reward/mean'], '.3f')} {sparkline(self._rewards[-_WIDTH:]):<{min(self._steps, _WIDTH)}}",
            f"{_source(m)}{_drawn(m)}",
            f"clipped {m[clipped]:.1%} of {unit}",
            f"cut {m['truncated/share']:.0%}",
            f"grad {_number(m['grad_norm'], '.2g')}",
            f"moved {m['weights/relative']:.1e}",
            f"{m['time/tokens_per_second']:.0f} tok/s",
            f"left {duration(self._left(m['step']))}",
        ]
        if m["rollouts/judged"] < m["rollouts/total"]:
            why = {"crashed": m["rollouts/crashed"], "timed out": m["rollouts/timeout"]}
            causes = "".join(f", {count} {cause}" for cause, count in why.items() if count)
            unjudged = m["rollouts/total"] - m["rollouts/judged"]
            parts.insert(2, f"unjudged {unjudged}/{m['rollouts/total']}{causes}")
        if "eval/reward" in m:
            parts.insert(
                2,
                f"held-out {_number(m['eval/reward'], '.3f')} {between(m['eval/reward_low'], m['eval/reward_high'])}",
            )
        self.say("  ".join(parts))
        said = (m["verdict/kind"], m["verdict/warning"])
        if said != self._said and said[0] != "learning":  # a state is said when it begins, not at each step of it
            self.say(f"    {m['verdict']}")
        self._said = said

    def go_on_from(self, lines: Sequence[dict[str, Any]]) -> None:
        """Have the journal's lines of the steps before, of a run that is gone on with, in the bars."""
        self._rewards = [m["reward/mean"] for m in lines if m["reward/mean"] is not None]
        if lines:
            self._said = (lines[-1]["verdict/kind"], lines[-1]["verdict/warning"])

    def crash(self, text: str) -> None:
        """The first failure of a reward function; the others are in rollouts/."""
        if not self._crashed:
            self._crashed = True
            self.say("    a reward function failed (each failure is in rollouts/; such answers are left out):")
            self.say("    " + text.strip().replace("\n", "\n    "))

    def _left(self, step: int) -> float:
        recent = self._seconds[-10:]
        return sum(recent) / len(recent) * (self._steps - step)


def _source(m: dict[str, Any]) -> str:
    """Where the gradient comes from: groups whose rewards differ, or a critic, with the share of the outcomes' variance that it knew."""
    if m["value/mean"] is None:
        return f"signal {m['groups/signal']}/{m['groups/total']}"
    return f"critic explains {_number(m['value/explained_variance'], '.0%')}"


def _drawn(m: dict[str, Any]) -> str:
    """What was drawn beside the groups of the step."""
    more = [f"{m['groups/drawn']} drawn"] if m["groups/replaced"] else []
    more += [f"{m['prompts/skipped']} skipped"] if m["prompts/skipped"] else []
    return f" ({', '.join(more)})" if more else ""


def sparkline(values: list[float]) -> str:
    """Values as bars between their lowest and highest."""
    if not values:
        return ""
    low, high = min(values), max(values)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((v - low) * scale)] for v in values)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None or not math.isfinite(value) else format(value, f"z{form}")  # z: no -0


def between(low: float | None, high: float | None) -> str:
    """An interval; its ends may be negative."""
    return f"({_number(low, '.2f')} to {_number(high, '.2f')})"


def duration(seconds: float) -> str:
    minutes, s = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{s:02}s"
