"""Data and rewards, checked before a weight is read: all that a user can get wrong in them is refused here.

In: the configuration, and rows if they come from Python. Out: `Inputs`. `job` and the command `eval` call it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gspo.config import Run
from gspo.errors import InputError
from gspo.models.load import load_tokenizer
from gspo.rewards.load import Found, load, open_scorers
from gspo.rewards.ready import Around
from gspo.rewards.runner import Pool
from gspo.rewards.score import Scorer
from gspo.stage_config import Sft
from gspo.tasks.data import Rows, held_out_rows, overlap, read_rows, repeated
from gspo.tasks.render import render
from gspo.types import Prompt

Row = Mapping[str, Any]
FROM_PYTHON = "python"
"""What run.yaml says of data whose rows were given from Python."""


@dataclass(frozen=True)
class Inputs:
    """Data and rewards, checked: all that a run needs before its weights."""

    prompts: tuple[Prompt, ...]
    reward: Scorer
    held_out: tuple[Prompt, ...]
    held_out_reward: Scorer
    notes: tuple[str, ...]
    tokenizer: Any = None
    found: tuple[Found, ...] = ()
    """What `reward` judges by, in the order of its judges."""
    pool: Pool | None = None
    """The processes of the reward functions, if they need any."""

    def close(self) -> None:
        """End the processes of the reward functions."""
        if self.pool is not None:
            self.pool.close()

    @property
    def longest(self) -> Prompt:
        return max((*self.prompts, *self.held_out), key=lambda prompt: len(prompt.token_ids))

    @property
    def sha256(self) -> str:
        """Of the prompts to train on, in order: a resumed run has to find the same."""
        digest = hashlib.sha256()
        for prompt in self.prompts:
            digest.update(f"{prompt.row} {prompt.text}\n".encode())
        return digest.hexdigest()


def read_inputs(run: Run, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None) -> Inputs:
    """Rows, reward functions and rendered prompts. Raises InputError for anything that cannot be used."""
    if rows is None and run.data.source == FROM_PYTHON:
        raise InputError(
            "the rows of this run were given from Python, so the command line does not have them: "
            "go on with gspo.train(resume=DIR, data=rows, reward=function)"
        )
    data = read_rows(run.data, rows=rows)
    held_out: Rows | None
    if eval_rows is not None:
        held_out = read_rows(run.data.model_copy(update={"limit": run.eval.limit}), rows=eval_rows)
    else:
        held_out = held_out_rows(run.data, run.eval, train=data)
    around = surroundings(run, data)
    sets = [(load(run.reward, around), data)]
    if held_out is not None:
        sets.append((load(run.eval.reward or run.reward, replace(around, rows=held_out)), held_out))
    tokenizer = load_tokenizer(run.model)
    rendered = render(data, tokenizer, run.data)
    twice = repeated(data, run.data.prompt)
    notes = [*data.notes, *rendered.notes, *([twice] if twice else [])]
    test: tuple[Prompt, ...] = ()
    if held_out is not None:
        shown = render(held_out, tokenizer, run.data)
        test, notes = shown.prompts, [*notes, *held_out.notes, *shown.notes]
        shared = overlap(data, held_out, run.data)
        notes += [shared] if shared else []
    notes += dict.fromkeys(note for found, _ in sets for each in found for note in each.ready.notes)
    scorers, pool = open_scorers(sets, run.judging)  # last, so that nothing refused leaves a process behind
    return Inputs(rendered.prompts, scorers[0], test, scorers[-1], tuple(notes), tokenizer, tuple(sets[0][0]), pool)


def surroundings(run: Run | Sft, rows: Rows) -> Around:
    """What the rewards of a run may depend on beside their arguments."""
    return Around(rows, run.data.prompt, run.data.system, run.sampling.max_new_tokens, run.judging)
