"""What the stages have in common before their first step: rows read, a folder, a model, what a checkpoint holds.

In: a stage's configuration, its checked inputs, the folder of a run to go on with. Out: `Prepared`, then
`Parts`. `sft_build` and `reward_build` call it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from gspo import presets
from gspo.build import about, go_on, open_policy, start, with_learning_rate
from gspo.console import Console
from gspo.errors import InputError
from gspo.inputs import Row, changed_code
from gspo.journal import Lines
from gspo.learner import Learner
from gspo.metrics import Metrics
from gspo.models.load import Policy
from gspo.place import Place, place_of
from gspo.stage_config import AnyStage
from gspo.stages.stage import Parts
from gspo.store import Store
from gspo.tasks.data import Check, Rows, held_out_rows, read_rows
from gspo.tasks.sampler import Sampler
from gspo.trackers import table
from gspo.trackers.side import Trackers
from gspo.types import Prompt


class StageInputs(Protocol):
    """What a stage learns and measures on, checked before its model is loaded."""

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Of the rows to learn."""
        ...

    @property
    def held_out(self) -> Sequence[object]: ...

    @property
    def notes(self) -> Sequence[str]: ...

    @property
    def code(self) -> Mapping[str, str]:
        """The sha256 of each of the user's own files."""
        ...

    @property
    def sha256(self) -> Mapping[str, str]:
        """Of all columns of the rows, those to learn and those held out: a resumed run has to find the same."""
        ...


def read_sets(
    run: AnyStage, check: Check, rows: Sequence[Row] | None, eval_rows: Sequence[Row] | None
) -> tuple[Rows, Rows | None]:
    """Rows to learn, and those held out, if there are any."""
    data = read_rows(run.data, rows=rows, check=check)
    if eval_rows is None:
        return data, held_out_rows(run.data, run.eval, train=data, check=check)
    return data, read_rows(run.data.model_copy(update={"limit": run.eval.limit}), rows=eval_rows, check=check)


NOTHING_HELD_OUT = (
    "there are no held-out rows, so nothing is evaluated and no checkpoint is the best: give eval.source=FILE"
)


def opened(run: AnyStage, resume: Path | None) -> Place:
    """The folder of the run, and what it goes on from. Raises InputError for a tracker that is not installed."""
    table.require(run.trackers)
    return place_of(run, resume)


@dataclass(frozen=True)
class Prepared:
    """A run whose model is loaded, and of which nothing is written yet."""

    run: AnyStage
    """With its number of steps."""
    policy: Policy
    threads: int
    console: Console


def prepared(run: AnyStage, inputs: StageInputs, place: Place, *, what: str, load: Callable[..., Policy]) -> Prepared:
    """Say the plan and load the model. `what`: the rows in a word."""
    place.require_same_data(inputs.sha256)
    count = len(inputs.prompts)
    steps = run.steps or math.ceil((run.epochs or 1) * count / run.batch_size)
    run = run.model_copy(update={"steps": steps, "epochs": None})
    console = Console(steps)
    place.say_anew(console)
    console.say(
        f"{count} {what} to learn, {len(inputs.held_out)} held out; {run.batch_size} {what} an update; {steps} updates, "
        f"{steps * run.batch_size / count:.2f} times through the data; micro-batches of up to {run.max_tokens_per_microbatch} tokens"
    )
    for note in inputs.notes:
        console.say(f"note: {note}")
    for change in changed_code(inputs.code, place.about):
        console.say(f"warning: {change}")
    policy, threads = open_policy(run, place, console, load)
    run = with_learning_rate(run, policy, console)
    return Prepared(run, policy, threads, console)


def parts(
    ready: Prepared,
    inputs: StageInputs,
    place: Place,
    learner_of: type[Learner] = Learner,
) -> Parts:
    """The folder of a new run, or the place where the checkpoint left it."""
    run, policy, console = ready.run, ready.policy, ready.console
    folder, saved = place.folder, place.saved
    assert run.steps is not None
    learner = learner_of(
        model=policy.model,
        row=presets.PRESETS["gspo"],  # which `annotate` alone reads, and nothing is annotated here
        settings=run.optimizer,
        temperature=1.0,
        max_new_tokens=1,
        total_updates=run.steps,
        compute_dtype=policy.compute_dtype,
        kernels=policy.kernels,
    )
    with ExitStack() as undo:  # the folder is let go again if anything below fails
        checkpoints = Store(folder, run.checkpoint.keep)
        undo.callback(checkpoints.close)
        progress = (
            start(run, folder, about(run, policy, ready.threads, inputs.sha256) | {"code": dict(inputs.code)})
            if saved is None
            else go_on(run, learner, saved, console)
        )
        checkpoints.settle(progress)
        lines = Lines(folder, after=place.kept)
        console.say_aside(lines.aside)
        undo.pop_all()
    return Parts(
        run=run,
        steps_in_all=run.steps,
        folder=folder,
        rows=len(inputs.prompts),
        policy=policy,
        sampler=Sampler(inputs.prompts, run.seed, progress.position),
        learner=learner,
        lines=lines,
        store=checkpoints,
        console=console,
        progress=progress,
        trackers=Trackers(run.trackers, folder, after=progress.step, say=console.say),
        best_loss=_lowest(lines.read()),
    )


def require_room(policy: Policy, tokens: Sequence[tuple[int, int]]) -> None:
    """Raise InputError if a row, of (row, tokens), exceeds the model's positions."""
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    for row, count in tokens:
        if positions is not None and count > positions:
            raise InputError(
                f"row {row}: {count} tokens of prompt and answer exceed the model's {positions} positions: shorten them, "
                "or set data.max_prompt_tokens, data.max_answer_tokens and data.too_long=drop"
            )


def _lowest(lines: Sequence[Metrics]) -> float | None:
    return min((line["eval/loss"] for line in lines if line.get("eval/loss") is not None), default=None)
