"""What the stages have in common: steps of one update each, evaluations, a journal, checkpoints, a signal in between.

rows -> packed batch -> loss -> optimizer

In: a `Stage`, whose kind says how a batch is made, what is optimised and what is measured. Out: a `Result`. The commands
`gspo sft` and `gspo reward` call `tune`; `stage_build` makes the parts.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar

from gspo.batch import Batch
from gspo.console import Console, duration, sparkline
from gspo.errors import OutOfMemoryError, RunError
from gspo.journal import Lines
from gspo.learner import Learner
from gspo.metrics import FORMAT, Metrics
from gspo.models.load import Policy
from gspo.stage_config import AnyStage
from gspo.stats import UpdateStats
from gspo.stopping import Stop
from gspo.store import Progress, Store
from gspo.tasks.sampler import Draw, Sampler
from gspo.trackers.side import Trackers
from gspo.view.report import report_of

_LINES = 40
"""About as many lines a run has on the terminal, beside those of its evaluations."""


@dataclass(frozen=True)
class Gain:
    """A number that the command ends with, before and after."""

    name: str
    form: str
    start: float | None
    """On held-out rows before the first step; None where not measured."""
    last: float | None
    """At the last evaluation."""

    def __str__(self) -> str:
        return f"{self.name}: {self.start:{self.form}} -> {self.last:{self.form}}"

    @property
    def measured(self) -> bool:
        return self.start is not None and self.last is not None


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    step: int
    """Last step done."""
    gains: Mapping[str, Gain]
    """By key of the journal, without `eval/`."""
    signal: int | None
    """Number of the signal that ended the run early, after saving."""

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else 0


def tune(stage: Stage) -> Result:
    """Run `stage` to its last step, or to the first signal."""
    with closing(stage), stage.stop.on_signals(stage.console.say):
        stage.measure_start()
        for step in stage.steps():
            stats = stage.update()
            metrics = stage.record(step, stats)
            stage.save_if_due(metrics)
        stage.save_if_stopped()
        report_of(stage.folder, stage.console.say)
    lines = stage.lines.read()
    gains = {
        key: Gain(name, form, _latest(lines[:1], f"eval/start/{key}"), _latest(lines, f"eval/{key}"))
        for key, (name, form) in stage.gains.items()
    }
    signal = stage.stop.by.value if stage.stop.by is not None else None
    return Result(stage.folder, stage.progress.step, gains, signal)


def _latest(lines: Sequence[Metrics], key: str) -> float | None:
    return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)


@dataclass(kw_only=True)
class Parts:
    """What a run of any stage consists of."""

    run: AnyStage
    steps_in_all: int
    folder: Path
    rows: int
    """How many rows there are to learn: an epoch."""
    policy: Policy
    sampler: Sampler
    learner: Learner
    lines: Lines
    store: Store
    console: Console
    progress: Progress
    trackers: Trackers
    best_loss: float | None = None
    """Lowest loss on held-out rows so far."""


@dataclass(kw_only=True)
class Stage(Parts, ABC):
    """The parts of a run and what `tune` calls on them."""

    together: ClassVar[int] = 1
    """Answers that are never cut apart."""
    held_out: Sized
    stop: Stop = field(default_factory=Stop)
    _seconds: dict[str, float] = field(default_factory=dict)
    _saved: int | None = None
    _start: Metrics = field(default_factory=dict)
    _losses: list[float] = field(init=False)
    _paces: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._losses = [line["loss"] for line in self.lines.read()]

    # -------------------------------------------------------------------------- of each kind its own

    @property
    @abstractmethod
    def gains(self) -> Mapping[str, tuple[str, str]]:
        """Key of what is measured -> its name and form for the last lines of the command."""

    @abstractmethod
    def batch(self, draws: Sequence[Draw]) -> Batch:
        """The update on what was drawn, under the budget."""

    @abstractmethod
    def learn(self, batch: Batch) -> tuple[UpdateStats, Metrics]:
        """One update, and what is to be journalled of it beside its numbers."""

    @abstractmethod
    def evaluate(self) -> Metrics:
        """What is found on the held-out rows: `eval/loss` and others under `eval/`."""

    @abstractmethod
    def shown(self, metrics: Metrics) -> str:
        """An evaluation in words."""

    def close(self) -> None:
        """End the processes that the run has started, and let others work in its folder."""
        with self.console.heartbeat.at("the trackers take what is left"):
            self.trackers.close()
        self.store.close()
        self.console.heartbeat.close()

    # -------------------------------------------------------------------------- steps

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to do, 1-based; ends early after a signal, when the step at hand is complete."""
        for step in range(self.progress.step + 1, self.steps_in_all + 1):
            if self.stop.by is not None:
                return
            yield step

    def update(self) -> tuple[UpdateStats, Metrics]:
        """Draw rows and do one update. Out of memory, it is tried again with smaller micro-batches."""
        with self._timed("update"):
            draws = self.sampler.take(self.run.batch_size)
            while True:
                batch = self.batch(draws)
                try:
                    return self.learn(self.learner.placed(batch))
                except OutOfMemoryError as error:
                    self._halve(batch, str(error))

    @property
    def budget(self) -> int:
        """Tokens of a micro-batch."""
        return self.progress.max_tokens_per_microbatch or self.run.max_tokens_per_microbatch

    def _halve(self, batch: Batch, words: str) -> None:
        largest = max(micro.token.stop - micro.token.start for micro in batch.plan)
        if all(micro.sequences <= self.together for micro in batch.plan):
            alone = "one answer" if self.together == 1 else f"{self.together} answers"
            raise RunError(
                f"out of memory ({words}) with {alone} at a time, of up to {largest} tokens with the prompt: "
                "set model.gradient_checkpointing=true, lower data.max_answer_tokens, or use a machine with more memory"
            )
        budget = max(1, min(self.budget, largest) // 2)
        self.progress = replace(self.progress, max_tokens_per_microbatch=budget)
        self.console.say(
            f"out of memory ({words}) with micro-batches of up to {largest} tokens: trying again with {budget}, from here on. "
            f"To start so: max_tokens_per_microbatch={budget}"
        )

    # -------------------------------------------------------------------------- measuring

    def measure(self) -> Metrics:
        """As `evaluate`, timed."""
        with self._timed("eval"):
            return self.evaluate()

    def measure_start(self) -> None:
        """What the starting model gives on the held-out rows, once for a run."""
        if self.progress.step or not self.held_out or not self.run.eval.every:
            return
        found = self.measure()
        self._seconds = {}
        self._start = {key.replace("eval", "eval/start", 1): value for key, value in found.items()}
        self.console.say(f"before training: held-out {self.shown(found)} on {len(self.held_out)} rows")

    def _measured(self, step: int) -> Metrics:
        """What is measured after this step; the first one also carries what was measured before it."""
        every = self.run.eval.every
        start, self._start = self._start, {}
        due = self.held_out and every and (step % every == 0 or step == self.steps_in_all)
        return {**start, **self.measure()} if due else start

    # -------------------------------------------------------------------------- writing

    def record(self, step: int, done: tuple[UpdateStats, Metrics]) -> Metrics:
        """Evaluate if it is due, then write and show the step."""
        stats, own = done
        self.progress = replace(self.progress, step=step, updates=self.learner.updates, position=self.sampler.position)
        measured, change = self._measured(step), self.learner.change()
        total = sum(self._seconds.values())
        metrics: Metrics = {
            "format": FORMAT,
            "step": step,
            "epoch": self.sampler.position / self.rows,
            "loss": stats.loss,
            **own,
            "tokens/packed": stats.packed_tokens,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "weights/changed": change.changed,
            "weights/relative": change.relative,
            **measured,
            **{f"time/{phase}": seconds for phase, seconds in self._seconds.items()},
            "time/step": total,
            "time/tokens_per_second": stats.packed_tokens / self._seconds["update"],
        }
        self.lines.append(metrics)
        self._seconds = {}
        self._show(metrics)
        return metrics

    def _show(self, m: Metrics) -> None:
        self._losses.append(m["loss"])
        self._paces.append(m["time/step"])
        step, steps = m["step"], self.steps_in_all
        evaluated = "eval/loss" in m
        if not evaluated and step % max(1, steps // _LINES) and step != steps:
            return
        recent = self._paces[-50:]
        parts = [
            f"step {step:>{len(str(steps))}}/{steps}",
            f"epoch {m['epoch']:.2f}",
            f"loss {m['loss']:.4f} {sparkline(self._losses[:: max(1, len(self._losses) // 20)][-20:])}",
            *([f"held-out {self.shown(m)}"] if evaluated else []),
            f"grad {m['grad_norm']:.2g}",
            f"rate {m['learning_rate']:.1e}",
            f"moved {m['weights/relative']:.1e}",
            f"{m['time/tokens_per_second']:.0f} tok/s",
            f"left {duration(sum(recent) / len(recent) * (steps - step))}",
        ]
        self.console.say("  ".join(parts))

    # -------------------------------------------------------------------------- saving

    def save_if_due(self, metrics: Mapping[str, Any]) -> None:
        """Save at the interval, at the end, and whenever the held-out loss is the lowest so far."""
        step, every = self.progress.step, self.run.checkpoint.every
        loss = metrics.get("eval/loss")
        best = loss is not None and (self.best_loss is None or loss < self.best_loss)
        if best:
            self.best_loss = loss
            self.progress = replace(self.progress, best_step=step)
        if best or step == self.steps_in_all or (every and step % every == 0):
            self._save()

    def save_if_stopped(self) -> None:
        """After a signal: whatever was done since the last checkpoint, be it only the start."""
        if self.stop.by is not None and self._saved != self.progress.step:
            self._save()

    def _save(self) -> None:
        with self.console.heartbeat.at(f"the checkpoint of step {self.progress.step} is written"):
            self.store.save(
                self.progress,
                model=self.policy.model,
                tokenizer=self.policy.tokenizer,
                weights=self.learner.master_weights(),
                moments=self.learner.moments(),
            )
        self._saved = self.progress.step
        self.store.settle(self.progress)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.heartbeat.at(f"step {self.progress.step + 1}, {phase}"):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start
