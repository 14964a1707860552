"""A run of supervised fine-tuning put together: data, reward and answers are checked before a weight is read.

In: a `config.Sft`, rows from Python, the folder of a run to go on with. Out: an `SftJob`. The command line calls `build`.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from gspo import presets, store
from gspo.build import about, go_on, new_folder, open_policy, require_same_data, start
from gspo.config import Sft
from gspo.console import Console
from gspo.engines.local import LocalEngine
from gspo.errors import InputError
from gspo.inputs import Row, surroundings
from gspo.journal import Lines, Metrics
from gspo.learner import Learner
from gspo.models.load import Policy, load_tokenizer
from gspo.rewards.load import load, open_scorers
from gspo.rewards.runner import Pool
from gspo.rewards.score import Scorer
from gspo.stages.sft import SftJob
from gspo.store import Store
from gspo.tasks.answers import Answered, checked_pairs, ended, render_answers
from gspo.tasks.data import Rows, held_out_rows, overlap, read_rows
from gspo.tasks.sampler import Sampler
from gspo.trackers import table
from gspo.trackers.side import Trackers


@dataclass(frozen=True)
class Inputs:
    """Answers to learn and to measure on, checked: all that a run needs before its weights."""

    answers: tuple[Answered, ...]
    held_out: tuple[Answered, ...]
    reward: Scorer | None
    """How sampled answers to the held-out prompts are judged, if they are."""
    notes: tuple[str, ...]
    pool: Pool | None = None
    """The processes of the reward functions, if they need any."""

    def close(self) -> None:
        """End the processes of the reward functions."""
        if self.pool is not None:
            self.pool.close()

    @property
    def sha256(self) -> str:
        """Of what is learned, in order: a resumed run has to find the same."""
        digest = hashlib.sha256()
        for each in self.answers:
            digest.update(f"{each.prompt.row} {each.prompt.text}\n{each.answer}\n".encode())
        return digest.hexdigest()


def read_inputs(run: Sft, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None) -> Inputs:
    """Rows, answers as ids, and the reward. Raises InputError for anything that cannot be used."""
    check = checked_pairs(run.data)
    held_out: Rows | None
    data = read_rows(run.data, rows=rows, check=check)
    if eval_rows is not None:
        held_out = read_rows(run.data.model_copy(update={"limit": run.eval.limit}), rows=eval_rows, check=check)
    else:
        held_out = held_out_rows(run.data, run.eval, train=data, check=check)
    if held_out is None and run.eval.reward is not None:
        raise InputError("eval.reward: there are no held-out prompts to sample answers to: give eval.source=FILE")
    tokenizer = load_tokenizer(run.model)
    learned = render_answers(data, tokenizer, run.data)
    if held_out is None:
        said = (
            "there are no held-out answers, so nothing is evaluated and no checkpoint is the best: give eval.source=FILE",
        )
        return Inputs(learned.rows, (), None, (*data.notes, *learned.notes, *(said if run.eval.every else ())))
    found = [] if run.eval.reward is None else load(run.eval.reward, surroundings(run, held_out))
    test = render_answers(held_out, tokenizer, run.data)
    shared = overlap(data, held_out, run.data)
    notes = [*data.notes, *learned.notes, *held_out.notes, *test.notes, *([shared] if shared else [])]
    notes += dict.fromkeys(note for each in found for note in each.ready.notes)
    if not found:
        return Inputs(learned.rows, test.rows, None, tuple(notes))
    (reward,), pool = open_scorers(
        [(found, held_out)], run.judging
    )  # last, so that nothing refused leaves a process behind
    return Inputs(learned.rows, test.rows, reward, tuple(notes), pool)


def build(
    run: Sft, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None, resume: Path | None = None
) -> SftJob:
    """Check the inputs, load the weights, join the parts. With `resume`, from its newest complete checkpoint.

    Raises:
        InputError: for whatever the user can mend; before any weight is read, but for answers that hold an end token
            or exceed the model's positions.
    """
    table.require(run.trackers)
    folder = resume or new_folder(run)
    saved = store.read_saved(folder) if resume else None
    inputs = read_inputs(run, rows=rows, eval_rows=eval_rows)
    with ExitStack() as opened:  # closed again if anything below fails
        opened.callback(inputs.close)
        job = _joined(run, inputs, folder, saved, opened)
        opened.pop_all()
    return job


def _joined(run: Sft, inputs: Inputs, folder: Path, saved: store.Saved | None, opened: ExitStack) -> SftJob:
    require_same_data(saved, inputs.sha256)
    steps = run.steps or math.ceil((run.epochs or 1) * len(inputs.answers) / run.batch_size)
    run = run.model_copy(update={"steps": steps, "epochs": None})
    console = Console(steps)
    console.say(_plan(run, inputs))
    for note in inputs.notes:
        console.say(f"note: {note}")
    policy, threads = open_policy(run, saved, console)
    inputs = _with_ends(inputs, policy)
    learner = _learner(run, steps, policy)
    engine = LocalEngine(policy, run.sampling, run.seed) if inputs.reward is not None else None
    checkpoints = Store(folder, run.checkpoint.keep)
    opened.callback(checkpoints.close)
    progress = (
        start(run, folder, about(run, policy, threads, inputs.sha256))
        if saved is None
        else go_on(run, learner, saved, console)
    )
    checkpoints.settle(progress)
    lines = Lines(folder, after=progress.step)
    return SftJob(
        run=run,
        steps_in_all=steps,
        folder=folder,
        answers={each.prompt.row: each for each in inputs.answers},
        held_out=inputs.held_out,
        reward=inputs.reward,
        pool=inputs.pool,
        policy=policy,
        sampler=Sampler([each.prompt for each in inputs.answers], run.seed, progress.position),
        engine=engine,
        learner=learner,
        lines=lines,
        store=checkpoints,
        console=console,
        progress=progress,
        trackers=Trackers(run.trackers, folder, after=progress.step, say=console.say),
        best_loss=_lowest(lines.read()),
    )


def _plan(run: Sft, inputs: Inputs) -> str:
    assert run.steps is not None
    epochs = run.steps * run.batch_size / len(inputs.answers)
    return (
        f"{len(inputs.answers)} answers to learn, {len(inputs.held_out)} held out; {run.batch_size} answers an update; {run.steps} updates, "
        f"{epochs:.2f} times through the data; micro-batches of up to {run.max_tokens_per_microbatch} tokens"
    )


def _with_ends(inputs: Inputs, policy: Policy) -> Inputs:
    """The inputs with each answer's end token. Raises InputError for what does not fit the model."""
    tokenizer = policy.tokenizer
    end = policy.stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    learned, test = (ended(part, policy.stop_ids, end, tokenizer) for part in (inputs.answers, inputs.held_out))
    positions = getattr(policy.model.config.get_text_config(), "max_position_embeddings", None)
    for each in (*learned, *test):
        tokens = len(each.prompt.token_ids) + len(each.answer_ids)
        if positions is not None and tokens > positions:
            raise InputError(
                f"row {each.prompt.row}: {tokens} tokens of prompt and answer exceed the model's {positions} positions: shorten them, "
                "or set data.max_prompt_tokens, data.max_answer_tokens and data.too_long=drop"
            )
    return replace(inputs, answers=learned, held_out=test)


def _learner(run: Sft, steps: int, policy: Policy) -> Learner:
    return Learner(
        model=policy.model,
        row=presets.PRESETS["gspo"],  # which `annotate` alone reads, and nothing is annotated here
        settings=run.optimizer,
        temperature=1.0,
        max_new_tokens=1,
        total_updates=steps,
        compute_dtype=policy.compute_dtype,
    )


def _lowest(lines: Sequence[Metrics]) -> float | None:
    return min((line["eval/loss"] for line in lines if line.get("eval/loss") is not None), default=None)
