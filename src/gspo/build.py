"""A run put together, in the order in which it can fail: configuration, data, reward and prompts before a weight is read.

In: a `Run`, rows from Python, the folder of a run to go on with. Out: a `Job` for the loop. The command line and the
Python API call `build` and `evaluate_model`.
"""

from __future__ import annotations

import platform
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import torch
import transformers

from gspo import __version__, preflight, rates, store
from gspo.advice import advice
from gspo.ahead import read_ahead
from gspo.config import Model, Run
from gspo.console import Console, plan
from gspo.critic import Critic, open_critic, require_vocabulary
from gspo.drift import read_start
from gspo.engines.local import LocalEngine
from gspo.errors import InputError
from gspo.evaluate import evaluate
from gspo.fit import require_fit, require_fit_of_config, require_room
from gspo.guard import State
from gspo.inputs import Inputs, Row, changed_code, read_inputs
from gspo.job import Job
from gspo.journal import Journal
from gspo.learner import Learner, cast
from gspo.machine import set_threads
from gspo.models import lora
from gspo.models.load import Policy, load_policy
from gspo.place import Place, place_of
from gspo.rescue import Rescue
from gspo.stage_config import AnyRun, RewardRun, Sft
from gspo.store import Progress, Store
from gspo.tasks.sampler import Sampler
from gspo.trackers import table
from gspo.trackers.side import Trackers
from gspo.types import Group

A = TypeVar("A", Run, Sft, RewardRun, Sft | RewardRun)


def build(
    run: Run, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None, resume: Path | None = None
) -> Job:
    """Check the inputs, load the weights, join the parts. With `resume`, from its newest complete checkpoint.

    Raises:
        InputError: before any weight is read, for whatever the user can mend.
    """
    table.require(run.trackers)
    place = place_of(run, resume)
    inputs = read_inputs(run, rows=rows, eval_rows=eval_rows)
    with ExitStack() as opened:  # closed again if anything below fails
        opened.callback(inputs.close)
        job = _joined(run, inputs, place, opened)
        opened.pop_all()
    return job


def _joined(run: Run, inputs: Inputs, place: Place, opened: ExitStack) -> Job:
    folder, saved = place.folder, place.saved
    place.require_same_data(inputs.sha256)
    ahead = read_ahead(saved.checkpoint, inputs.prompts, saved.progress.ahead) if saved is not None else []
    console = _said(run, inputs, place)
    require_vocabulary(run)
    if saved is None:
        require_fit_of_config(inputs, run)
    policy, threads = open_policy(run, place, console)
    run = with_learning_rate(run, policy, console)
    require_fit(policy, inputs, run)
    critic = _critic(run, policy, saved, inputs, console)
    learner = learner_of(run, policy, critic)
    engine = engine_of(run, policy, console)
    _require_disk(run, folder, policy, console, new=saved is None)
    checkpoints = Store(folder, run.checkpoint.keep)
    opened.callback(checkpoints.close)
    progress = (
        start(run, folder, about(run, policy, threads, inputs.sha256) | _described(run, engine, inputs))
        if saved is None
        else go_on(run, learner, saved, console)
    )
    engine.load(learner.weights(), version=progress.step)
    rescue = None
    if run.guard != "off":
        rescue = Rescue(run, folder, learner, critic, run.guard, progress.guard or State(), console.say)
    checkpoints.settle(progress)
    journal = Journal(folder, run.sampling.max_new_tokens, after=place.kept)
    console.say_aside(journal.aside)
    console.go_on_from(journal.before)
    return Job(
        run=run,
        folder=folder,
        inputs=inputs,
        policy=policy,
        sampler=Sampler(inputs.prompts, run.seed, progress.position, band=run.data.difficulty, seen=progress.seen),
        engine=engine,
        learner=learner,
        journal=journal,
        store=checkpoints,
        console=console,
        progress=progress,
        critic=critic,
        rescue=rescue,
        start=_start_answers(run, folder, inputs) if progress.step and rescue is not None else [],
        trackers=Trackers(run.trackers, folder, after=progress.step, say=console.say),  # once the journal is settled
        ahead=deque(ahead),
    )


def _start_answers(run: Run, folder: Path, inputs: Inputs) -> list[Group]:
    """What a run that is gone on with measures the distance to its start with; nothing if it evaluates nothing."""
    return read_start(folder, inputs.held_out) if run.eval.every and inputs.held_out else []


def _said(run: Run, inputs: Inputs, place: Place) -> Console:
    """The console, with the plan and what there is to know about it said. Raises InputError for rewards that are not sound."""
    console = Console(run.steps)
    place.say_anew(console)
    console.say(plan(run))
    for note in (*advice(run, inputs), *inputs.notes, *(() if place.saved else preflight.require_sound(run, inputs))):
        console.say(f"note: {note}")
    for change in changed_code(inputs.code, place.about):
        console.say(f"warning: {change}")
    return console


def _critic(run: Run, policy: Policy, saved: store.Saved | None, inputs: Inputs, console: Console) -> Critic | None:
    critic = open_critic(run, policy, saved)
    if critic is not None:
        console.say(critic.announcement)
        if critic.own is not None:
            require_room(critic.own.model.config, "critic", inputs, run)
    return critic


def _require_disk(run: Run, folder: Path, policy: Policy, console: Console, *, new: bool) -> None:
    """Raise InputError if the checkpoints of a new run have no room; of one that goes on, say so."""
    room = preflight.disk(run, folder, preflight.weights_kept(run, policy.model))
    if room.mend is not None and new:
        raise InputError(room.mend)
    if room.note or room.mend is not None:
        console.say(f"note: {room.text}")


def open_policy(
    run: AnyRun, place: Place, console: Console, load: Callable[..., Policy] = load_policy
) -> tuple[Policy, int]:
    """The policy, with the weights of the checkpoint to go on from if there is one, and the number of threads."""
    # Rounding depends on the number of threads: a resumed run keeps that of its start.
    threads = set_threads(run.threads if place.about is None else place.about["threads"])
    model = run.model if place.saved is None else Model(**{**dict(run.model), **place.saved.model})
    with console.heartbeat.at(f"the model {run.model.name} is loaded"):
        policy = load(model, seed=run.seed)  # of a fresh adapter
    console.say(f"{policy.announcement}; {threads} threads")
    return policy, threads


def with_learning_rate(run: A, policy: Policy, console: Console) -> A:
    """The run with the learning rate that an adapter has by default, if it has one and none was set; says so.

    A rate that is far below, as one that was meant for all weights, is remarked upon.
    """
    if lora.adapter_of(policy.model) is None:
        return run
    full = type(run.optimizer).model_fields["learning_rate"].default
    width = policy.model.config.get_text_config().hidden_size
    rate = rates.of_adapter(full, width)
    why = f"10 times the {full:g} of all weights, times (2000 / {width})^0.5 for the model's width, see docs/lora.md"
    if "learning_rate" not in run.optimizer.model_fields_set:
        console.say(f"optimizer.learning_rate={rate:g}, which is the adapter's default: {why}")
        return run.model_copy(update={"optimizer": run.optimizer.model_copy(update={"learning_rate": rate})})
    if run.optimizer.learning_rate < rate / 5:
        console.say(
            f"note: optimizer.learning_rate={run.optimizer.learning_rate:g} is set, and is low for an adapter, whose default here is {rate:g} ({why})"
        )
    return run


def start(run: AnyRun, folder: Path, about: dict[str, Any]) -> Progress:
    """Make the folder of a new run."""
    store.write_run(folder, run, about)
    return Progress(step=0, updates=0, position=0)


def go_on(run: AnyRun, learner: Learner, saved: store.Saved, console: Console) -> Progress:
    """Put the learner where the checkpoint left it, and say what was restored."""
    assert run.steps is not None
    progress = saved.progress
    learner.restore(saved.moments, progress.updates, emptied=progress.emptied)
    console.say(f"resumed from {saved.checkpoint}: {saved.words}")
    before = store.change_steps(saved.folder, run.steps)
    if before != run.steps and run.optimizer.schedule != "constant":
        console.say(
            f"note: the {run.optimizer.schedule} schedule now ends at step {run.steps} instead of {before}, "
            "so the learning rate does not follow its old course"
        )
    if before < run.steps and isinstance(run, Run) and run.max_staleness:
        console.say(
            f"note: answers had been sampled ahead for {before} steps at most, so those of the next ones are fresher than "
            f"max_staleness={run.max_staleness} allows, and the run is not that of {run.steps} steps from the start"
        )
    return progress


def _described(run: Run, engine: LocalEngine, inputs: Inputs) -> dict[str, Any]:
    return {"algorithm": run.algorithm.source, "sampling": engine.describe(), "code": inputs.code}


def learner_of(run: Run, policy: Policy, critic: Critic | None) -> Learner:
    reference = None
    if run.algorithm.needs_reference:
        reference = _reference(run, policy)
    return Learner(
        model=policy.model,
        row=run.algorithm,
        settings=run.optimizer,
        temperature=run.sampling.temperature,
        max_new_tokens=run.longest,
        total_updates=run.steps * run.algorithm.updates_per_step * run.algorithm.epochs,
        compute_dtype=policy.compute_dtype,
        kernels=policy.kernels,
        reference=reference,
        critic=run.critic,
        values=critic.own.predict if critic is not None and critic.own is not None else None,
        value_head=critic.head if critic is not None and critic.own is None else None,
    )


def _reference(run: Run, policy: Policy) -> Any:
    """The policy that the run started from; a resumed one, too."""
    if lora.adapter_of(policy.model) is not None:
        return lora.Reference(policy.model, lora.asked(run.model).start)
    reference = load_policy(run.model).model.requires_grad_(False)
    cast(reference, policy.compute_dtype)
    return reference


def engine_of(run: Run, policy: Policy, console: Console) -> LocalEngine:
    longest = run.longest
    engine = LocalEngine(
        policy, run.sampling, run.seed, weights=run.engine.weights, record_routes=True, longest=longest
    )
    if engine.copied_bytes:
        console.say(
            f"engine.weights={run.engine.weights}: answers and evaluations come from a rounded copy of the weights, "
            f"{engine.copied_bytes / 1e6:.1f} MB more; parity/* is how far its log-probabilities are from the trainer's"
        )
    console.say("sampling: " + ", ".join(f"{k}={v}" for k, v in engine.describe().items()))
    return engine


def about(run: AnyRun, policy: Policy, threads: int, data_sha256: Mapping[str, str]) -> dict[str, Any]:
    """What run.yaml says, beside the configuration, of what a run was started with."""
    source = policy.source
    return {
        "gspo": __version__,
        "command": run.command,
        "format": store.FORMAT,
        "weights": {"name": source.name, "origin": source.origin, "sha256": source.sha256},
        "data_sha256": dict(data_sha256),
        "compute_dtype": str(policy.compute_dtype).removeprefix("torch."),
        "device": str(policy.device),
        "threads": threads,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
    }


def evaluate_model(run: Run) -> Iterator[str]:
    """Answer and judge the held-out prompts of `run` with its model; yields the lines of the command `eval`.

    Raises InputError if the recipe has no held-out prompts.
    """
    inputs = read_inputs(run)
    try:
        yield from _evaluated(run, inputs)
    finally:
        inputs.close()


def _evaluated(run: Run, inputs: Inputs) -> Iterator[str]:
    if not inputs.held_out:
        raise InputError("nothing to evaluate on: this data has no held-out rows of its own; give eval.source=FILE")
    set_threads(run.threads)
    policy = load_policy(run.model)
    yield policy.announcement
    cast(policy.model, policy.compute_dtype)
    engine = LocalEngine(policy, run.sampling, run.seed, weights=run.engine.weights, longest=run.longest)
    e = run.eval
    kinds = [False, True] if e.greedy else [False]
    for greedy in kinds:
        found, _ = evaluate(
            engine,
            inputs.held_out,
            inputs.held_out_reward,
            samples=e.samples,
            pass_at=e.pass_at,
            greedy=greedy,
            partner=inputs.held_out_talks,
        )
        name, k = "greedy" if greedy else "sampled", found.samples
        yield from (f"note: {notice}" for notice in inputs.held_out_reward.notices())
        yield f"{name} reward, avg@{k}: {found.reward.value:.3f} (95 % interval {found.reward.low:.3f} to {found.reward.high:.3f}) on {found.rows} prompts"
        yield f"{name} pass@{k}: {found.pass_at_k.value:.3f} ({found.pass_at_k.low:.3f} to {found.pass_at_k.high:.3f}); {found.length:.1f} tokens an answer; {found.unjudged} prompts unjudged"
