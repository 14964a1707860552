"""Supervised fine-tuning: the likelihood of given answers, on the batch, learner and store of `train`.

answers -> packed batch -> cross-entropy -> optimizer

In: an `SftJob`, which `sft_build` makes. Out: a `Result`. The command `gspo sft` calls `tune`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from gspo.algorithms.losses import Tally
from gspo.batch import Batch, Microbatch, answers_batch
from gspo.config import Sft
from gspo.console import Console, duration, sparkline
from gspo.engines.local import LocalEngine
from gspo.errors import OutOfMemoryError, RunError
from gspo.evaluate import measure
from gspo.journal import FORMAT, Lines, Metrics, evaluation_metrics, write_evaluations, writing
from gspo.learner import Learner
from gspo.machine import give_pages_back
from gspo.models.load import Policy
from gspo.rewards.runner import Pool
from gspo.rewards.score import Scorer
from gspo.stats import UpdateStats
from gspo.stopping import Stop
from gspo.store import Progress, Store
from gspo.tasks.answers import Answered
from gspo.tasks.sampler import Sampler
from gspo.trackers.side import Trackers
from gspo.types import Group, Rollout, Segment
from gspo.types import Stop as Ending
from gspo.view.report import report_of

_LINES = 40
"""About as many lines a run has on the terminal, beside those of its evaluations."""


def likelihood(logprob_N: Tensor, entropy_N: Tensor, batch: Batch, micro: Microbatch) -> tuple[Tensor, Tally]:
    """Cross-entropy, the mean over all the answer tokens of an update: an `Objective` of the learner."""
    del entropy_N, micro
    return -logprob_N.sum() / batch.tokens, Tally()


def grouped(drawn: Sequence[tuple[int, Answered]]) -> list[Group]:
    """(ordinal of the draw, answer) in, groups out: answers to equal prompts together, so that the prompt stands once."""
    together: dict[bytes, list[tuple[int, Answered]]] = {}
    for ordinal, each in drawn:
        together.setdefault(each.prompt.token_ids.tobytes(), []).append((ordinal, each))
    return [
        Group(
            prompt=part[0][1].prompt,
            ordinal=part[0][0],
            rollouts=tuple(_as_rollout(i, each) for i, (_, each) in enumerate(part)),
        )
        for part in together.values()
    ]


def _as_rollout(index: int, each: Answered) -> Rollout:
    ids = each.answer_ids
    segment = Segment(ids, np.ones(len(ids), dtype=bool), np.zeros(len(ids), dtype=np.float32))
    return Rollout(index, (segment,), each.answer, Ending.EOS, versions=(0, 0))


@dataclass(frozen=True)
class Result:
    """What a run came to."""

    folder: Path
    step: int
    """Last step done."""
    start: Mapping[str, float | None]
    """`loss` and `reward` on held-out answers before the first step; None where not measured."""
    last: Mapping[str, float | None]
    """The same at the last evaluation."""
    signal: int | None
    """Number of the signal that ended the run early, after saving."""

    @property
    def exit_code(self) -> int:
        return 128 + self.signal if self.signal is not None else 0


def tune(job: SftJob) -> Result:
    """Run `job` to its last step, or to the first signal."""
    with closing(job), job.stop.on_signals(job.console.say):
        job.measure_start()
        for step in job.steps():
            stats = job.update()
            metrics = job.record(step, stats)
            job.save_if_due(metrics)
        job.save_if_stopped()
        report_of(job.folder, job.console.say)
    lines = job.lines.read()
    return Result(
        folder=job.folder,
        step=job.progress.step,
        start={key: _latest(lines[:1], f"eval/start/{key}") for key in ("loss", "reward")},
        last={key: _latest(lines, f"eval/{key}") for key in ("loss", "reward")},
        signal=job.stop.by.value if job.stop.by is not None else None,
    )


def _latest(lines: Sequence[Metrics], key: str) -> float | None:
    return next((line[key] for line in reversed(lines) if line.get(key) is not None), None)


@dataclass
class SftJob:
    """The parts of a run and what `tune` calls on them."""

    run: Sft
    steps_in_all: int
    folder: Path
    answers: Mapping[int, Answered]
    """By row of their prompt."""
    held_out: tuple[Answered, ...]
    reward: Scorer | None
    """How sampled answers to the held-out prompts are judged, if they are."""
    pool: Pool | None
    """The processes in which they are judged, if that needs any."""
    policy: Policy
    sampler: Sampler
    engine: LocalEngine | None
    learner: Learner
    lines: Lines
    store: Store
    console: Console
    progress: Progress
    trackers: Trackers
    best_loss: float | None = None
    """Lowest loss on held-out answers so far."""
    stop: Stop = field(default_factory=Stop)
    _seconds: dict[str, float] = field(default_factory=dict)
    _saved: int | None = None
    _start: Metrics = field(default_factory=dict)
    _losses: list[float] = field(default_factory=list)
    _paces: list[float] = field(default_factory=list)

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to do, 1-based; ends early after a signal, when the step at hand is complete."""
        for step in range(self.progress.step + 1, self.steps_in_all + 1):
            if self.stop.by is not None:
                return
            yield step

    def close(self) -> None:
        """End the processes that the run has started, and let others work in its folder."""
        if self.pool is not None:
            self.pool.close()
        self.trackers.close()
        self.store.close()
        self.console.heartbeat.close()

    def update(self) -> UpdateStats:
        """Draw answers and do one update. Out of memory, it is tried again with smaller micro-batches."""
        with self._timed("update"):
            draws = self.sampler.take(self.run.batch_size)
            groups = grouped([(draw.ordinal, self.answers[draw.prompt.row]) for draw in draws])
            while True:
                batch = answers_batch(groups, self._budget)
                try:
                    return self.learner.update(self.learner.placed(batch), likelihood)
                except OutOfMemoryError as error:
                    self._halve(batch, str(error))

    @property
    def _budget(self) -> int:
        return self.progress.max_tokens_per_microbatch or self.run.max_tokens_per_microbatch

    def _halve(self, batch: Batch, words: str) -> None:
        largest = max(micro.token.stop - micro.token.start for micro in batch.plan)
        if all(micro.sequences == 1 for micro in batch.plan):
            raise RunError(
                f"out of memory ({words}) with one answer at a time, of up to {largest} tokens with its prompt: "
                "set model.gradient_checkpointing=true, lower data.max_answer_tokens, or use a machine with more memory"
            )
        budget = max(1, min(self._budget, largest) // 2)
        self.progress = replace(self.progress, max_tokens_per_microbatch=budget)
        self.console.say(
            f"out of memory ({words}) with micro-batches of up to {largest} tokens: trying again with {budget}, from here on. "
            f"To start so: max_tokens_per_microbatch={budget}"
        )

    # -------------------------------------------------------------------------- measuring

    def measure(self) -> Metrics:
        """Loss on the held-out answers and, with a reward, that of sampled ones, under `loss`, `reward`, ..."""
        with self._timed("eval"):
            batch = answers_batch(grouped(list(enumerate(self.held_out))), self._budget)
            logprob_N = self.learner.logprobs(self.learner.model, self.learner.placed(batch))
            found: Metrics = {"eval/loss": -float(logprob_N.double().mean()), "eval/tokens": batch.tokens}
            give_pages_back()
            if self.engine is not None and self.reward is not None:
                self.engine.load(self.learner.weights(), version=self.progress.step)
                prompts = [each.prompt for each in self.held_out]
                evaluations = measure(self.engine, prompts, self.reward, self.run.eval)
                rollouts = self.folder / "rollouts"
                with writing(rollouts, self.progress.step):
                    rollouts.mkdir(exist_ok=True)
                    write_evaluations(rollouts, self.progress.step, evaluations)
                for prefix, evaluation in evaluations.items():
                    found |= evaluation_metrics(prefix, evaluation)
                for notice in self.reward.notices():
                    self.console.say(f"note: {notice}")
        return found

    def measure_start(self) -> None:
        """The held-out loss of the starting model, once for a run."""
        if self.progress.step or not self.held_out or not self.run.eval.every:
            return
        found = self.measure()
        self._seconds = {}
        self._start = {key.replace("eval", "eval/start", 1): value for key, value in found.items()}
        self.console.say(f"before training: held-out {_shown(found)} on {len(self.held_out)} answers")

    def _measured(self, step: int) -> Metrics:
        """What is measured after this step; the first one also carries what was measured before it."""
        every = self.run.eval.every
        start, self._start = self._start, {}
        due = self.held_out and every and (step % every == 0 or step == self.steps_in_all)
        return {**start, **self.measure()} if due else start

    # -------------------------------------------------------------------------- writing

    def record(self, step: int, stats: UpdateStats) -> Metrics:
        """Evaluate if it is due, then write and show the step."""
        self.progress = replace(self.progress, step=step, updates=self.learner.updates, position=self.sampler.position)
        measured, change = self._measured(step), self.learner.change()
        total = sum(self._seconds.values())
        metrics: Metrics = {
            "format": FORMAT,
            "step": step,
            "epoch": self.sampler.position / len(self.answers),
            "loss": stats.loss,
            "loss/tokens": stats.tokens,
            "tokens/packed": stats.packed_tokens,
            "entropy": stats.entropy,
            "grad_norm": stats.grad_norm,
            "learning_rate": stats.learning_rate,
            "weights/changed": change.changed,
            "weights/relative": change.relative,
            **measured,
            **{f"time/{phase}": seconds for phase, seconds in self._seconds.items()},
            "time/step": total,
            "time/tokens_per_second": stats.tokens / self._seconds["update"],
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
            *([f"held-out {_shown(m)}"] if evaluated else []),
            f"grad {m['grad_norm']:.2g}",
            f"rate {m['learning_rate']:.1e}",
            f"moved {m['weights/relative']:.1e}",
            f"{m['time/tokens_per_second']:.0f} tok/s",
            f"left {duration(sum(recent) / len(recent) * (steps - step))}",
        ]
        self.console.say("  ".join(parts))

    def save_if_due(self, metrics: Metrics) -> None:
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


def _shown(m: Mapping[str, Any]) -> str:
    reward = m.get("eval/reward")
    sampled = (
        "" if reward is None else f", reward {reward:.3f} ({m['eval/reward_low']:.2f}-{m['eval/reward_high']:.2f})"
    )
    return f"loss {m['eval/loss']:.4f}{sampled}"
