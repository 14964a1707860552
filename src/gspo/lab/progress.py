"""What the lab says on the terminal while it runs: a line an arm, and on a terminal a line with the time left.

In: trials as they start and end, with their steps and seconds. Out: text. `runner` calls it.
"""

from __future__ import annotations

import math
import signal
from collections import defaultdict
from collections.abc import Sequence

from rich.console import Console
from rich.status import Status

from gspo.lab.arms import Record
from gspo.lab.experiment import Trial

Running = tuple[Trial, int, float, int]
"""(trial, steps done since it began, seconds since it began, steps done before)."""


class Board:
    """Counts steps and seconds by setting, since a step of one costs another time than of the next."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False, soft_wrap=True)
        self._status: Status | None = None
        self._done = self._all = 0
        self._steps: dict[str, int] = defaultdict(int)
        self._seconds: dict[str, float] = defaultdict(float)
        self._left: float | None = None
        self._told: set[str] = set()

    def begin(self, done: int, total: int) -> None:
        self._done, self._all = done, total
        kept = f", {done} of them kept from earlier" if done else ""
        self._console.print(f"{total} arms{kept}")

    def started(self, trial: Trial, resumed: int) -> None:
        if resumed:
            self._console.print(f"  {label(trial)}: goes on after step {resumed}", markup=False)

    def blocked(self, trial: Trial) -> None:
        if trial.id not in self._told:
            self._told.add(trial.id)
            self._console.print(f"  {label(trial)}: another process is running it; waiting", markup=False)

    def ended(self, record: Record, steps: int) -> None:
        self._done += 1
        self._steps[record.setting] += steps
        self._seconds[record.setting] += record.wall
        said = f"{record.name} ({record.setting}), seed {record.seed}"
        if record.status == "failed":
            text = f"FAILED, {record.error}"
        else:
            assert record.outcome is not None
            o = record.outcome
            text = f"reward {o.start:.3f} -> {o.final:.3f}, {record.wall:.0f} s{', collapsed' if o.collapsed else ''}"
        left = "" if self._left is None or self._done == self._all else f"; left about {duration(self._left)}"
        self._console.print(f"  {self._done}/{self._all}  {said}: {text}{left}", markup=False)

    def stopping(self, number: signal.Signals, running: int) -> None:
        self._console.print(
            f"{number.name}: {running} arms finish their step and are saved. Again to stop at once.", markup=False
        )

    def show(self, running: Sequence[Running], waiting: Sequence[Trial], jobs: int) -> None:
        """The line with the time left, on a terminal."""
        self._left = self.left(running, waiting, jobs)
        if not self._console.is_terminal:
            return
        if not running:
            self.close()
            return
        trial, steps, _, before = running[0]
        left = "" if self._left is None else f", left about {duration(self._left)}"
        text = f"{self._done}/{self._all} arms{left}; {label(trial)}, step {steps + before}/{trial.run.steps}"
        if self._status is None:
            self._status = self._console.status(text)
            self._status.start()
        self._status.update(text)

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()
            self._status = None

    def left(self, running: Sequence[Running], waiting: Sequence[Trial], jobs: int) -> float | None:
        """Seconds to the end at the speed measured so far; None before a step was done."""
        steps, seconds = defaultdict(int, self._steps), defaultdict(float, self._seconds)
        for trial, done, since, _ in running:
            steps[trial.arm.setting] += done
            seconds[trial.arm.setting] += since
        if not any(steps.values()):
            return None
        mean = sum(seconds.values()) / sum(steps.values())

        def pace(trial: Trial) -> float:
            setting = trial.arm.setting
            return seconds[setting] / steps[setting] if steps[setting] else mean

        rest = sum(pace(t) * max(0, t.run.steps - done - before) for t, done, _, before in running)
        rest += sum(pace(t) * t.run.steps for t in waiting)
        return rest / max(1, min(jobs, len(running) + len(waiting)))


def label(trial: Trial) -> str:
    return f"{trial.arm.name} ({trial.arm.setting}), seed {trial.seed}"


def duration(seconds: float) -> str:
    minutes = math.ceil(seconds / 60)
    return f"{seconds:.0f} s" if seconds < 90 else f"{minutes} min" if minutes < 90 else f"{minutes / 60:.1f} h"
