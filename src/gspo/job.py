"""The parts of a training run and what the loop calls on them: one method for each arrow of a step.

`build` makes a `Job`; `loop` drives it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals

from gspo.algorithms.bands import sized
from gspo.batch import Batch, Batches, make_batches
from gspo.config import Run
from gspo.console import Console
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.errors import OutOfMemoryError, RunError
from gspo.evaluate import Evaluation, measure
from gspo.inputs import Inputs
from gspo.journal import Journal, Metrics, StepOutcome
from gspo.learner import Learner, Objective, policy_objective
from gspo.machine import give_pages_back
from gspo.models.load import Policy
from gspo.presets import Algorithm
from gspo.rollout import rollout
from gspo.stats import Parity, UpdateStats, rollout_log_ratio
from gspo.stopping import Stop
from gspo.store import Progress, Store
from gspo.tasks.sampler import Sampler
from gspo.trackers.side import Trackers
from gspo.types import Group
from gspo.view.report import report_of

_DOING = {
    "rollout": "answers are sampled and judged",
    "old": "log-probabilities before the step are computed",
    "update": "the weights are updated",
    "publish": "the engine takes the new weights",
    "eval": "held-out prompts are answered and judged",
}
"""What is said of a phase that lasts."""


@dataclass
class Job:
    """The parts of a training run, and the few lines that join them for the loop."""

    run: Run
    folder: Path
    inputs: Inputs
    policy: Policy
    sampler: Sampler
    engine: LocalEngine
    learner: Learner
    objective: Objective
    journal: Journal
    store: Store
    console: Console
    progress: Progress
    trackers: Trackers
    ahead: deque[list[Group]] = field(default_factory=deque)
    """Groups sampled for the steps to come, the next one first."""
    stop: Stop = field(default_factory=Stop)
    _seconds: dict[str, float] = field(default_factory=dict)
    _row: Algorithm = field(init=False)
    """The run's row, its band sized for the step at hand."""
    _skipped: int = 0
    _oversize: int = 0
    _saved: int | None = None
    _start: dict[str, Evaluation] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._row = self.run.algorithm

    @property
    def stopped_by(self) -> Signals | None:
        """The signal that ends the run early."""
        return self.stop.by

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to do, 1-based; ends early after a signal, when the step at hand is complete."""
        for step in range(self.progress.step + 1, self.run.steps + 1):
            if self.stopped_by is not None:
                return
            yield step

    def rollout(self) -> list[Group]:
        """The groups of the step at hand, after sampling those of the step `max_staleness` ahead of it, if there is one."""
        with self._timed("rollout"):
            done = self.progress.step
            last = min(done + 1 + self.run.max_staleness, self.run.steps)
            while done + len(self.ahead) < last:
                self.ahead.append(self._sample())
            give_pages_back()
            return self.ahead.popleft()

    def _sample(self) -> list[Group]:
        """Draw prompts, sample their answers, judge them."""
        draws = self.sampler.take(self.run.prompts_per_step)
        requests = [Request(prompt=d.prompt, ordinal=d.ordinal, count=self.run.group_size) for d in draws]
        try:
            groups = rollout(self.engine, requests, self.inputs.reward)
        except RunError:
            self._keep_what_is_done()
            raise
        for notice in self.inputs.reward.notices():
            self.console.say(f"note: {notice}")
        return groups

    def close(self) -> None:
        """End the processes that the run has started, and let others work in its folder."""
        self.inputs.close()
        with self.console.heartbeat.at("the trackers take what is left"):
            self.trackers.close()
        self.store.close()
        self.console.heartbeat.close()

    def write_report(self) -> None:
        """`report.html`, at the end."""
        report_of(self.folder, self.console.say)

    def learn(self, groups: Sequence[Group]) -> tuple[list[Batch], list[UpdateStats]]:
        """Annotate, then update with every batch, `algorithm.epochs` times over.

        Out of memory, it is tried again with smaller micro-batches. Their size changes no result but by rounding: updates
        after the first keep the old log-probabilities of the larger ones. Raises RunError if a single answer does not fit.
        """
        batches: list[Batch] | None = None
        done: list[UpdateStats] = []
        while batches is None or len(done) < len(batches) * self.run.algorithm.epochs:
            try:
                if batches is None:
                    batches = self._annotate(groups)
                else:
                    again, i = divmod(len(done), len(batches))
                    stats = self._update(batches[i])
                    done.append(
                        replace(stats, parity=Parity()) if again else stats
                    )  # it was measured in the first pass
            except OutOfMemoryError as error:
                self._halve(groups, str(error))
                # Until the first update the old pass can be done again, in the pieces of the training pass.
                batches = self.learner.recut(self._batches(groups), batches) if done and batches else None
        return batches, done

    def _batches(self, groups: Sequence[Group]) -> Batches:
        batches = make_batches(groups, self.run.algorithm, self._budget)
        if batches.largest > max(self._budget, self._oversize):
            self._oversize = batches.largest
            self.console.say(
                f"note: an answer makes {batches.largest} tokens with its prompt, more than a micro-batch's {self._budget}; it runs alone"
            )
        return batches

    def _annotate(self, groups: Sequence[Group]) -> list[Batch]:
        with self._timed("old"):
            batches = self._batches(groups)
            self._skipped = batches.skipped * self.run.algorithm.epochs
            annotated = self.learner.annotate(batches)
            if self.run.algorithm.sizes_band:
                self._row = sized(self.run.algorithm, rollout_log_ratio(annotated))
                self.objective = policy_objective(self._row)
            return annotated

    def _update(self, batch: Batch) -> UpdateStats:
        with self._timed("update"):
            return self.learner.update(batch, self.objective)

    @property
    def _budget(self) -> int:
        return self.progress.max_tokens_per_microbatch or self.run.max_tokens_per_microbatch

    def _halve(self, groups: Sequence[Group], words: str) -> None:
        batches = make_batches(groups, self.run.algorithm, self._budget)
        if not batches.divisible:
            raise RunError(
                f"out of memory ({words}) with one answer at a time, of up to {batches.largest} tokens with its prompt: "
                "set model.gradient_checkpointing=true, shorten sampling.max_new_tokens, or use a machine with more memory"
            )
        budget = max(1, min(self._budget, batches.largest) // 2)
        self.progress = replace(self.progress, max_tokens_per_microbatch=budget)
        self.console.say(
            f"out of memory ({words}) with micro-batches of up to {batches.largest} tokens: trying again with {budget}, from here on. "
            f"To start so: max_tokens_per_microbatch={budget}"
        )

    def publish(self, step: int) -> None:
        """Give the engine the new weights."""
        with self._timed("publish"):
            self.engine.load(self.learner.weights(), version=step)

    def record(
        self, step: int, groups: Sequence[Group], batches: Sequence[Batch], updates: Sequence[UpdateStats]
    ) -> Metrics:
        """Evaluate if it is due, then write and show the step."""
        evaluations = self._evaluations(step)
        outcome = StepOutcome(
            step=step,
            row=self._row,
            groups=groups,
            batches=batches,
            skipped=self._skipped,
            updates=updates,
            change=self.learner.change(),
            evaluations=evaluations,
            seconds=self._seconds,
        )
        metrics = self.journal.record(outcome)
        self._seconds = {}
        self.console.step(metrics)
        for error in (r.reward.error for g in groups for r in g.rollouts if r.reward and r.reward.error):
            self.console.crash(error)
        last = metrics.get("eval/reward")
        last = last if last is not None and math.isfinite(last) else self.progress.last_reward
        self.progress = replace(
            self.progress,
            step=step,
            updates=self.learner.updates,
            position=self.sampler.position,
            last_reward=last,
            ahead=len(self.ahead),
        )
        return metrics

    def save_if_due(self, metrics: Metrics) -> None:
        """Save at the interval, at the end, and whenever the evaluation is the best so far."""
        step, every = self.progress.step, self.run.checkpoint.every
        reward = metrics.get("eval/reward")
        reward = reward if reward is not None and math.isfinite(reward) else None
        best = reward is not None and (self.progress.best_reward is None or reward > self.progress.best_reward)
        if best:
            self.progress = replace(self.progress, best_reward=reward, best_step=step)
        if best or step == self.run.steps or (every and step % every == 0):
            self._save()

    def save_if_stopped(self) -> None:
        """After a signal: whatever was done since the last checkpoint, be it only the start."""
        if self.stopped_by is not None and self._saved != self.progress.step:
            self._save()

    def _keep_what_is_done(self) -> None:
        """The step at hand cannot be done: whoever mends its cause can go on from the one before it."""
        if self.progress.step and self._saved != self.progress.step:
            self._save()

    def _save(self) -> None:
        with self.console.heartbeat.at(f"the checkpoint of step {self.progress.step} is written"):
            self.store.save(
                self.progress,
                model=self.policy.model,
                tokenizer=self.policy.tokenizer,
                weights=self.learner.master_weights(),
                moments=self.learner.moments(),
                # A step that failed may have sampled more, which the position in the data does not know of.
                ahead=list(self.ahead)[: self.progress.ahead],
            )
        self._saved = self.progress.step
        self.store.settle(self.progress)

    def _evaluations(self, step: int) -> dict[str, Evaluation]:
        """What is measured after this step; the first one also carries what was measured before it."""
        every = self.run.eval.every
        start, self._start = self._start, {}
        if not self.inputs.held_out or not every or (step % every and step != self.run.steps):
            return start
        return {**start, **self.measure()}

    def measure(self) -> dict[str, Evaluation]:
        """Evaluate the weights as they are, under the prefixes of their journal keys."""
        with self._timed("eval"):
            return measure(self.engine, self.inputs.held_out, self.inputs.held_out_reward, self.run.eval)

    def measure_start(self) -> None:
        """The held-out reward of the starting policy, once for a run."""
        if self.progress.step or not self.inputs.held_out or not self.run.eval.every:
            return
        self._start = {key.replace("eval", "eval/start", 1): value for key, value in self.measure().items()}
        self._seconds = {}
        reward = self._start["eval/start"].reward
        if not math.isfinite(reward.value):
            self.console.say("before training: no held-out answer was judged")
            return
        self.progress = replace(self.progress, start_reward=reward.value, last_reward=reward.value)
        self.console.say(
            f"before training: held-out {reward.value:.3f} ({reward.low:.2f}-{reward.high:.2f}) "
            f"on {len(self.inputs.held_out)} prompts"
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.heartbeat.at(f"step {self.progress.step + 1}, {_DOING[phase]}"):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def stopping_on_signals(self) -> AbstractContextManager[None]:
        """SIGINT and SIGTERM end the run after the step at hand, saved; a second one ends it at once."""
        return self.stop.on_signals(self.console.say)
