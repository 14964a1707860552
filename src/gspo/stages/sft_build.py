"""A run of supervised fine-tuning put together: data, reward and answers are checked before a weight is read.

In: a `config.Sft`, rows from Python, the folder of a run to go on with. Out: an `SftJob`. The command line calls `build`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from gspo.engines.local import LocalEngine
from gspo.errors import InputError
from gspo.inputs import Row, code_of, surroundings
from gspo.models.load import Policy, load_policy, load_tokenizer
from gspo.place import Place
from gspo.rewards.call import FromFile
from gspo.rewards.load import load, open_scorers
from gspo.rewards.runner import Pool
from gspo.rewards.score import Scorer
from gspo.stage_config import Sft
from gspo.stages.sft import SftJob
from gspo.stages.stage_build import NOTHING_HELD_OUT, opened, parts, prepared, read_sets, require_room
from gspo.tasks.answers import Answered, checked_pairs, ended, render_answers
from gspo.tasks.data import overlap
from gspo.tasks.identity import data_sha256
from gspo.types import Prompt


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
    files: tuple[FromFile, ...] = ()
    """Of reward functions: the user's own."""

    def close(self) -> None:
        """End the processes of the reward functions."""
        if self.pool is not None:
            self.pool.close()

    @property
    def prompts(self) -> list[Prompt]:
        return [each.prompt for each in self.answers]

    @property
    def code(self) -> Mapping[str, str]:
        """The sha256 of each of the user's own files."""
        return code_of(self.files)

    @cached_property
    def sha256(self) -> Mapping[str, str]:
        """Of all columns of the rows, those to learn and those held out: a resumed run has to find the same."""
        return data_sha256(self.prompts, [each.prompt for each in self.held_out])


def read_inputs(run: Sft, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None) -> Inputs:
    """Rows, answers as ids, and the reward. Raises InputError for anything that cannot be used."""
    data, held_out = read_sets(run, checked_pairs(run.data), rows, eval_rows)
    if held_out is None and run.eval.reward is not None:
        raise InputError("eval.reward: there are no held-out prompts to sample answers to: give eval.source=FILE")
    tokenizer = load_tokenizer(run.model)
    learned = render_answers(data, tokenizer, run.data)
    if held_out is None:
        said = (NOTHING_HELD_OUT,) if run.eval.every else ()
        return Inputs(learned.rows, (), None, (*data.notes, *learned.notes, *said))
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
    files = tuple(each.source for each in found if each.source is not None)
    return Inputs(learned.rows, test.rows, reward, tuple(notes), pool, files)


def build(
    run: Sft, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None, resume: Path | None = None
) -> SftJob:
    """Check the inputs, load the weights, join the parts. With `resume`, from its newest complete checkpoint.

    Raises:
        InputError: for whatever the user can mend; before any weight is read, but for answers that hold an end token
            or exceed the model's positions.
    """
    place = opened(run, resume)
    inputs = read_inputs(run, rows=rows, eval_rows=eval_rows)
    try:
        return _joined(run, inputs, place)
    except BaseException:
        inputs.close()
        raise


def _joined(run: Sft, inputs: Inputs, place: Place) -> SftJob:
    ready = prepared(run, inputs, place, what="answers", load=load_policy)
    whole = _with_ends(inputs, ready.policy)
    common = parts(ready, inputs, place)
    return SftJob(
        **vars(common),
        answers={each.prompt.row: each for each in whole.answers},
        held_out=whole.held_out,
        reward=inputs.reward,
        pool=inputs.pool,
        engine=LocalEngine(ready.policy, run.sampling, run.seed) if inputs.reward is not None else None,
    )


def _with_ends(inputs: Inputs, policy: Policy) -> Inputs:
    """The inputs with each answer's end token. Raises InputError for what does not fit the model."""
    tokenizer = policy.tokenizer
    end = policy.stop_ids[0] if tokenizer.eos_token_id is None else tokenizer.eos_token_id
    learned, test = (ended(part, policy.stop_ids, end, tokenizer) for part in (inputs.answers, inputs.held_out))
    require_room(policy, [(each.prompt.row, each.tokens) for each in (*learned, *test)])
    return replace(inputs, answers=learned, held_out=test)
