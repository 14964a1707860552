"""A run put together: everything that the loop calls, built in the order in which it can fail.

Configuration, data, reward and prompts are checked before a weight is read. The command line and the Python API call `build`.
"""

from __future__ import annotations

import platform
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import transformers

from gspo import __version__, presets, settings, store
from gspo.batch import Batch, make_batches
from gspo.config import Run
from gspo.console import Console, plan
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.errors import InputError
from gspo.evaluate import Evaluation, evaluate
from gspo.journal import Journal, Metrics, StepOutcome
from gspo.learner import Learner, Objective, cast, policy_objective
from gspo.machine import set_threads
from gspo.models.load import Policy, load_policy, load_tokenizer
from gspo.rewards.load import RewardFunction, load_reward
from gspo.rollout import rollout
from gspo.stats import UpdateStats
from gspo.store import Progress, Store
from gspo.tasks.data import Rows, held_out_rows, overlap, read_rows
from gspo.tasks.render import render
from gspo.tasks.sampler import Sampler
from gspo.types import Group, Prompt

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Inputs:
    """Data and rewards, checked: all that a run needs before its weights."""

    prompts: tuple[Prompt, ...]
    reward: RewardFunction
    held_out: tuple[Prompt, ...]
    held_out_reward: RewardFunction
    notes: tuple[str, ...]


def read_inputs(run: Run, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None) -> Inputs:
    """Rows, reward functions and rendered prompts. Raises InputError for anything that cannot be used."""
    data = read_rows(run.data, rows=rows)
    reward = load_reward(run.reward, data)
    held_out: Rows | None
    if eval_rows is not None:
        held_out = read_rows(run.data.model_copy(update={"limit": run.eval.limit}), rows=eval_rows)
    else:
        held_out = held_out_rows(run.data, run.eval, train=data)
    held_out_reward = load_reward(run.eval.reward or run.reward, held_out) if held_out else reward
    tokenizer = load_tokenizer(run.model)
    rendered = render(data, tokenizer, run.data)
    notes = [*data.notes, *rendered.notes]
    test: tuple[Prompt, ...] = ()
    if held_out is not None:
        shown = render(held_out, tokenizer, run.data)
        test, notes = shown.prompts, [*notes, *held_out.notes, *shown.notes]
        shared = overlap(data, held_out, run.data)
        notes += [shared] if shared else []
    return Inputs(rendered.prompts, reward, test, held_out_reward, tuple(notes))


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
    stopped_by: signal.Signals | None = None
    _seconds: dict[str, float] = field(default_factory=dict)
    _skipped: int = 0
    _start: dict[str, Evaluation] = field(default_factory=dict)

    def steps(self) -> Iterator[int]:
        """Numbers of the steps to do, 1-based; ends early after a signal, when the step at hand is complete."""
        for step in range(self.progress.step + 1, self.run.steps + 1):
            if self.stopped_by is not None:
                return
            yield step

    def rollout(self) -> list[Group]:
        """Draw prompts, sample their answers, judge them."""
        with self._timed("rollout"):
            draws = self.sampler.take(self.run.prompts_per_step)
            requests = [Request(prompt=d.prompt, ordinal=d.ordinal, count=self.run.group_size) for d in draws]
            return rollout(self.engine, requests, self.inputs.reward)

    def annotate(self, groups: Sequence[Group]) -> list[Batch]:
        """Batches of the step's updates with old log-probabilities, advantages and weights."""
        with self._timed("old"):
            batches = make_batches(groups, self.run.algorithm, self.run.max_tokens_per_microbatch)
            self._skipped = batches.skipped
            return self.learner.annotate(batches)

    def update(self, batch: Batch) -> UpdateStats:
        with self._timed("update"):
            return self.learner.update(batch, self.objective)

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
        last = metrics.get("eval/reward", self.progress.last_reward)
        self.progress = replace(
            self.progress, step=step, updates=self.learner.updates, position=self.sampler.position, last_reward=last
        )
        return metrics

    def save_if_due(self, metrics: Metrics) -> None:
        """Save at the interval, at the end, before a stop, and whenever the evaluation is the best so far."""
        step, every = self.progress.step, self.run.checkpoint.every
        reward = metrics.get("eval/reward")
        best = reward is not None and (self.progress.best_reward is None or reward > self.progress.best_reward)
        if best:
            self.progress = replace(self.progress, best_reward=reward)
        if best or step == self.run.steps or self.stopped_by is not None or (every and step % every == 0):
            self._save(best)

    def _save(self, best: bool) -> None:
        checkpoint = self.store.save(
            self.progress,
            model=self.policy.model,
            tokenizer=self.policy.tokenizer,
            weights=self.learner.master_weights(),
            moments=self.learner.moments(),
        )
        if best:
            self.store.mark_best(checkpoint)
        self.store.prune()

    def _evaluations(self, step: int) -> dict[str, Evaluation]:
        """What is measured after this step; the first one also carries what was measured before it."""
        every = self.run.eval.every
        start, self._start = self._start, {}
        if not self.inputs.held_out or not every or (step % every and step != self.run.steps):
            return start
        return {**start, **self.measure()}

    def measure(self) -> dict[str, Evaluation]:
        """Evaluate the weights as they are, under the prefixes of their journal keys."""
        e, inputs = self.run.eval, self.inputs
        with self._timed("eval"):
            found, _ = evaluate(
                self.engine, inputs.held_out, inputs.held_out_reward, samples=e.samples, pass_at=e.pass_at
            )
            measured = {"eval": found}
            if e.greedy:
                measured["eval/greedy"], _ = evaluate(
                    self.engine, inputs.held_out, inputs.held_out_reward, pass_at=e.pass_at, greedy=True
                )
        return measured

    def measure_start(self) -> None:
        """The held-out reward of the starting policy, once for a run."""
        if self.progress.step or not self.inputs.held_out or not self.run.eval.every:
            return
        self._start = {key.replace("eval", "eval/start", 1): value for key, value in self.measure().items()}
        self._seconds = {}
        reward = self._start["eval/start"].reward
        self.progress = replace(self.progress, start_reward=reward.value, last_reward=reward.value)
        self.console.say(
            f"before training: held-out {reward.value:.3f} ({reward.low:.2f}-{reward.high:.2f}) "
            f"on {len(self.inputs.held_out)} prompts"
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - start

    @contextmanager
    def stopping_on_signals(self) -> Iterator[None]:
        """SIGINT and SIGTERM end the run after the step at hand, saved; a second one ends it at once."""
        before: dict[signal.Signals, Any] = {}

        def stop(number: int, frame: FrameType | None) -> None:
            self.stopped_by = signal.Signals(number)
            for each, handler in before.items():
                signal.signal(each, handler)
            self.console.say(f"{self.stopped_by.name}: finishing this step, then saving. Again to stop at once.")

        if threading.current_thread() is threading.main_thread():  # elsewhere the caller owns the signals
            before |= {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)


def build(
    run: Run, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None, resume: Path | None = None
) -> Job:
    """Check the inputs, load the weights, join the parts. With `resume`, from its newest complete checkpoint.

    Raises:
        InputError: before any weight is read, for whatever the user can mend.
    """
    folder = resume or _new_folder(run)
    checkpoint = store.latest(resume) if resume else None
    progress = store.read_progress(checkpoint) if checkpoint else Progress(step=0, updates=0, position=0)
    console = Console(run.steps)
    console.say(plan(run))
    inputs = read_inputs(run, rows=rows, eval_rows=eval_rows)
    threads = set_threads(run.threads)
    for note in (*presets.advice(run.algorithm), *_sampling_advice(run), *inputs.notes):
        console.say(f"note: {note}")
    policy = load_policy(
        run.model if checkpoint is None else run.model.model_copy(update={"name": str(checkpoint), "revision": None})
    )
    console.say(f"{policy.announcement}; {threads} threads")
    learner = _learner(run, policy)
    if checkpoint is not None:
        learner.restore(store.read_moments(checkpoint), progress.updates)
        console.say(
            f"resumed from {checkpoint}: weights, optimizer ({progress.updates} updates), position {progress.position} in the data"
        )
    engine = LocalEngine(policy, run.sampling, run.seed)
    engine.load(learner.weights(), version=progress.step)
    console.say("sampling: " + ", ".join(f"{k}={v}" for k, v in engine.describe().items()))
    if resume is None:
        store.write_run(folder, run, _about(policy, engine, threads))
    return Job(
        run=run,
        folder=folder,
        inputs=inputs,
        policy=policy,
        sampler=Sampler(inputs.prompts, run.seed, progress.position),
        engine=engine,
        learner=learner,
        objective=policy_objective(run.algorithm),
        journal=Journal(folder, run.algorithm, run.sampling.max_new_tokens, after=progress.step),
        store=Store(folder, run.checkpoint.keep),
        console=console,
        progress=progress,
    )


def _new_folder(run: Run) -> Path:
    folder = Path(run.dir or "runs/run")
    if folder.exists() and any(folder.iterdir()):
        raise InputError(
            f"dir={folder}: there is a run in this folder. Continue it with `gspo train --resume {folder}`, or choose another dir"
        )
    return folder


def _learner(run: Run, policy: Policy) -> Learner:
    reference = None
    if run.algorithm.needs_reference:
        reference = load_policy(run.model).model.requires_grad_(False)
        cast(reference, policy.compute_dtype)
    return Learner(
        model=policy.model,
        row=run.algorithm,
        settings=run.optimizer,
        temperature=run.sampling.temperature,
        max_new_tokens=run.sampling.max_new_tokens,
        total_updates=run.steps * run.algorithm.updates_per_step,
        compute_dtype=policy.compute_dtype,
        reference=reference,
    )


def _sampling_advice(run: Run) -> list[str]:
    s = run.sampling
    if s.top_p == 1 and s.top_k == 0:
        return []
    return [
        f"top_p={s.top_p:g}, top_k={s.top_k}: answers are sampled from a truncated distribution and trained on the full one, so engine and trainer "
        "differ by the mass cut off (see parity/signed). top_p=1 top_k=0 has no such gap."
    ]


def _about(policy: Policy, engine: LocalEngine, threads: int) -> dict[str, Any]:
    source = policy.source
    return {
        "gspo": __version__,
        "format": store.FORMAT,
        "weights": {"name": source.name, "origin": source.origin, "sha256": source.sha256},
        "compute_dtype": str(policy.compute_dtype).removeprefix("torch."),
        "device": str(policy.device),
        "threads": threads,
        "sampling": engine.describe(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def resumed_run(folder: Path, words: Sequence[str]) -> Run:
    """The configuration of the run in `folder`; `steps` alone may be changed.

    Raises InputError if there is no such run, or if a word would make it another run.
    """
    store.latest(folder)
    other = [word for word in words if word.partition("=")[0] != "steps"]
    if other:
        raise InputError(
            f"--resume continues the run in {folder} as it was configured; {other[0]!r} would make it another run. Only steps can be changed"
        )
    return settings.load(folder / "run.yaml", [f"dir={folder}", *words])


def evaluate_model(run: Run) -> Iterator[str]:
    """Answer and judge the held-out prompts of `run` with its model; yields the lines of the command `eval`.

    Raises InputError if the recipe has no held-out prompts.
    """
    inputs = read_inputs(run)
    if not inputs.held_out:
        raise InputError("nothing to evaluate on: this data has no held-out rows of its own; give eval.source=FILE")
    set_threads(run.threads)
    policy = load_policy(run.model)
    yield policy.announcement
    cast(policy.model, policy.compute_dtype)
    engine = LocalEngine(policy, run.sampling, run.seed)
    e = run.eval
    kinds = [False, True] if e.greedy else [False]
    for greedy in kinds:
        found, _ = evaluate(
            engine, inputs.held_out, inputs.held_out_reward, samples=e.samples, pass_at=e.pass_at, greedy=greedy
        )
        name, k = "greedy" if greedy else "sampled", found.samples
        yield f"{name} reward, avg@{k}: {found.reward.value:.3f} (95 % interval {found.reward.low:.3f} to {found.reward.high:.3f}) on {found.rows} prompts"
        yield f"{name} pass@{k}: {found.pass_at_k.value:.3f} ({found.pass_at_k.low:.3f} to {found.pass_at_k.high:.3f}); {found.length:.1f} tokens an answer; {found.unjudged} prompts unjudged"
