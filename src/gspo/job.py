"""The parts of a training run and what the loop calls on them: one method for each arrow of a step.

`build` makes a `Job`; `loop` drives it.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from signal import Signals
from typing import TypeVar

from gspo.batch import Batch
from gspo.config import Run
from gspo.console import Console, between
from gspo.critic import Critic
from gspo.drawing import Drawn, draw
from gspo.drift import kl_to_start, sample_start
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.errors import DivergedError, RunError
from gspo.evaluate import Evaluation, measure
from gspo.inputs import Inputs
from gspo.journal import Journal
from gspo.learner import Learner
from gspo.metrics import Metrics, StepOutcome
from gspo.models.load import Policy
from gspo.rescue import Rescue
from gspo.rollout import rollout
from gspo.stats import UpdateStats
from gspo.stopping import Stop
from gspo.store import Progress, Store
from gspo.tasks.sampler import Draw, Sampler
from gspo.trackers.side import Trackers
from gspo.types import Group
from gspo.updates import Updates
from gspo.view.report import report_of

_DOING = {
    "rollout": "answers are sampled and judged",
    "old": "log-probabilities before the step are computed",
    "update": "the weights are updated",
    "critic": "the critic is updated",
    "publish": "the engine takes the new weights",
    "eval": "held-out prompts are answered and judged",
}
"""What is said of a phase that lasts."""

T = TypeVar("T")


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
    journal: Journal
    store: Store
    console: Console
    progress: Progress
    trackers: Trackers
    critic: Critic | None = None
    rescue: Rescue | None = None
    """The guard; None with guard=off."""
    start: list[Group] = field(default_factory=list)
    """Answers of the starting policy, which the guard measures the distance from it with."""
    ahead: deque[Drawn] = field(default_factory=deque)
    """What was drawn for the steps to come, the next one first."""
    updates: Updates = field(init=False)
    stop: Stop = field(default_factory=Stop)
    _seconds: dict[str, float] = field(default_factory=dict)
    _drawn: Drawn = field(default_factory=lambda: Drawn([]))
    """What the step at hand was drawn with."""
    _saved: int | None = None
    _start: dict[str, Evaluation] = field(default_factory=dict)
    binary: bool = True
    """Every answer that was evaluated so far is worth 0 or 1."""
    ended: str | None = None
    """Why the run is over before its last step."""

    def __post_init__(self) -> None:
        done = self.progress
        self.updates = Updates(
            run=self.run,
            learner=self.learner,
            critic=self.critic,
            rescue=self.rescue,
            console=self.console,
            timed=self._timed,
            max_tokens=done.max_tokens_per_microbatch,
            next_kl=done.kl_coefficient,
        )

    @property
    def stopped_by(self) -> Signals | None:
        """The signal that ends the run early."""
        return self.stop.by

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to do, 1-based; ends early after a signal, when the step at hand is complete."""
        for step in range(self.progress.step + 1, self.run.steps + 1):
            if self.stopped_by is not None or self.ended is not None:
                return
            yield step

    def rollout(self) -> list[Group]:
        """The groups of the step at hand, after sampling those of the step `max_staleness` ahead of it, if there is one."""
        with self._timed("rollout"):
            done = self.progress.step
            last = min(done + 1 + self.run.max_staleness, self.run.steps)
            while done + len(self.ahead) < last:
                self.ahead.append(self._draw())
            self._drawn = self.ahead.popleft()
            return self._drawn.groups

    def _draw(self) -> Drawn:
        """Draw prompts for a step, sample their answers, judge them."""
        run = self.run
        try:
            drawn = draw(
                self.sampler, self._answer, run.algorithm, prompts=run.prompts_per_step, solved=run.eval.pass_at
            )
        except RunError:
            self._keep_what_is_done()
            raise
        for notice in self.inputs.reward.notices():
            self.console.say(f"note: {notice}")
        return drawn

    def _answer(self, draws: Sequence[Draw]) -> list[Group]:
        count, talks = self.run.group_size, self.inputs.talks
        requests = [Request(prompt=d.prompt, ordinal=d.ordinal, count=count, partner=talks) for d in draws]
        return self._surviving(lambda: rollout(self.engine, requests, self.inputs.reward))

    def _surviving(self, work: Callable[[], T]) -> T:
        """`work`, once more from the weights that the guard puts back if these cannot be sampled from."""
        try:
            return work()
        except DivergedError as error:
            if self.rescue is None or not self.rescue.repairs or not self.learner.updates:
                raise
            self.rescue.after_divergence(error)
            self.engine.abandon()
            self.publish(self.engine.version)
            return work()

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
        """The step's batches and what their updates did."""
        return self.updates.learn(groups)

    def publish(self, step: int) -> None:
        """Give the engine the new weights."""
        with self._timed("publish"):
            self.engine.load(self.learner.weights(), version=step)

    def record(
        self, step: int, groups: Sequence[Group], batches: Sequence[Batch], updates: Sequence[UpdateStats]
    ) -> Metrics:
        """Evaluate if it is due, then write and show the step."""
        evaluations = self._evaluations(step)
        drift = kl_to_start(self.learner, self.start, self.updates.budget) if "eval" in evaluations else None
        outcome = StepOutcome(
            step=step,
            row=self.updates.row,
            groups=groups,
            replaced=self._drawn.replaced,
            passed_over=self._drawn.skipped,
            batches=batches,
            skipped=self.updates.skipped,
            updates=updates,
            change=self.learner.change(),
            evaluations=evaluations,
            kl_start=drift,
            seconds=self._seconds,
        )
        metrics = self.journal.record(outcome, self.rescue.watch if self.rescue is not None else None)
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
            kl_coefficient=self.updates.next_kl,
            max_tokens_per_microbatch=self.updates.max_tokens,
            seen=self.sampler.seen,
        )
        return metrics

    def act(self) -> None:
        """Do what the guard decided after the step. Raises RunError, everything saved, if that is the end."""
        rescue = self.rescue
        if rescue is None or rescue.decision.action == "none":
            return
        step, action = self.progress.step, rescue.decision.action
        if action != "warn":
            if not rescue.returned:
                rescue.put_back()
                self.publish(step)
            self.ahead.clear()  # written by the weights that have gone
            self.progress = replace(self.progress, ahead=0)
        if action == "stop":
            self._save()
            raise RunError(rescue.diagnosis(step))
        self.console.say(f"    {rescue.words()}")

    def save_if_due(self, metrics: Metrics) -> None:
        """Save at the interval, at the end, and whenever the evaluation is the best so far."""
        step, every = self.progress.step, self.run.checkpoint.every
        returned = self.rescue is not None and self.rescue.returned
        reward = metrics.get("eval/reward")
        reward = reward if reward is not None and math.isfinite(reward) else None
        # After a rollback these are no longer the weights that were measured.
        best = reward is not None and not returned and reward > _or_less(self.progress.best_reward)
        if best:
            self.progress = replace(self.progress, best_reward=reward, best_step=step, stale=0)
        elif reward is not None:
            self.progress = replace(self.progress, stale=self.progress.stale + 1)
        self.ended = self._ended(reward)
        if best or step == self.run.steps or (every and step % every == 0) or self.ended:
            self._save()

    def _ended(self, reward: float | None) -> str | None:
        """Why the run need not go on after an evaluation."""
        patience = self.run.eval.patience
        if patience is None or reward is None:
            return None
        if reward >= self.run.eval.pass_at:
            return f"solved: the held-out reward is {reward:.3f}"
        if self.progress.stale < patience:
            return None
        return f"no better for {self.progress.stale} evaluations than {_or_less(self.progress.best_reward):.3f}, after step {self.progress.best_step}"

    def save_if_stopped(self) -> None:
        """After a signal: whatever was done since the last checkpoint, be it only the start."""
        if self.stopped_by is not None and self._saved != self.progress.step:
            self._save()

    def _keep_what_is_done(self) -> None:
        """The step at hand cannot be done: whoever mends its cause can go on from the one before it."""
        if self.progress.step and self._saved != self.progress.step:
            self._save()

    def _save(self) -> None:
        if self.rescue is not None:
            self.progress = replace(self.progress, guard=self.rescue.at_save(self.progress.step))
        moments, own = self.learner.moments(), None if self.critic is None else self.critic.own
        self.progress = replace(
            self.progress,
            emptied=self.learner.updates > 0 and not moments,
            critic_updates=None if own is None else own.updates,
        )
        with self.console.heartbeat.at(f"the checkpoint of step {self.progress.step} is written"):
            self.store.save(
                self.progress,
                model=self.policy.model,
                tokenizer=self.policy.tokenizer,
                weights=self.learner.master_weights(),
                moments=moments,
                # A step that failed may have sampled more, which the position in the data does not know of.
                ahead=list(self.ahead)[: self.progress.ahead],
                critic=None if self.critic is None else self.critic.state(),
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
            i, settings = self.inputs, self.run.eval
            found = self._surviving(
                lambda: measure(self.engine, i.held_out, i.held_out_reward, settings, i.held_out_talks)
            )
        self.binary = self.binary and found["eval"].binary
        return found

    def measure_start(self) -> None:
        """The held-out reward of the starting policy, once for a run."""
        if self.progress.step or not self.inputs.held_out or not self.run.eval.every:
            return
        if self.rescue is not None:
            self.start = sample_start(self.engine, self.inputs.held_out, self.folder)
        self._start = {key.replace("eval", "eval/start", 1): value for key, value in self.measure().items()}
        self._seconds = {}
        reward = self._start["eval/start"].reward
        if not math.isfinite(reward.value):
            self.console.say("before training: no held-out answer was judged")
            return
        self.progress = replace(self.progress, start_reward=reward.value, last_reward=reward.value)
        self.console.say(
            f"before training: held-out {reward.value:.3f} {between(reward.low, reward.high)} "
            f"on {len(self.inputs.held_out)} prompts"
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        with self.console.heartbeat.at(f"step {self.progress.step + 1}, {_DOING[phase]}"):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    def stopping_on_signals(self) -> AbstractContextManager[None]:
        """SIGINT, SIGTERM and SIGHUP end the run after the step at hand, saved; a second one of the first two ends it at once."""
        return self.stop.on_signals(self.console.say)


def _or_less(value: float | None) -> float:
    return -math.inf if value is None else value
