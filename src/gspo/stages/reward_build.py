"""A reward model's run put together: pairs are read, checked and made into ids before a weight is read.

In: a `config.RewardRun`, rows from Python, the folder of a run to go on with. Out: a `RewardJob`. The command line calls
`build`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from gspo.config import Model
from gspo.inputs import Row
from gspo.models.load import Policy, load_tokenizer
from gspo.models.scorer import load_scorer
from gspo.stage_config import RewardRun
from gspo.stages.reward_model import RewardJob, ScoreLearner
from gspo.stages.stage_build import NOTHING_HELD_OUT, opened, parts, prepared, read_sets, require_room
from gspo.tasks.data import overlap
from gspo.tasks.identity import data_sha256
from gspo.tasks.pairs import Preferred, checked_preferences, render_preferences
from gspo.types import Prompt


@dataclass(frozen=True)
class Inputs:
    """Pairs to learn and to measure on, checked: all that a run needs before its weights."""

    pairs: tuple[Preferred, ...]
    held_out: tuple[Preferred, ...]
    notes: tuple[str, ...]

    @property
    def prompts(self) -> list[Prompt]:
        return [each.prompt for each in self.pairs]

    @property
    def code(self) -> Mapping[str, str]:
        """No reward is asked."""
        return {}

    @cached_property
    def sha256(self) -> Mapping[str, str]:
        """Of all columns of the rows, those to learn and those held out: a resumed run has to find the same."""
        return data_sha256(self.prompts, [each.prompt for each in self.held_out])


def read_inputs(run: RewardRun, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None) -> Inputs:
    """Rows and pairs as ids. Raises InputError for anything that cannot be used."""
    data, held_out = read_sets(run, checked_preferences(run.data), rows, eval_rows)
    tokenizer = _as_shown(load_tokenizer(run.model), run)
    learned = render_preferences(data, tokenizer, run.data)
    if held_out is None:
        said = (NOTHING_HELD_OUT,) if run.eval.every else ()
        return Inputs(learned.rows, (), (*data.notes, *learned.notes, *said))
    test = render_preferences(held_out, tokenizer, run.data)
    shared = overlap(data, held_out, run.data)
    notes = (*data.notes, *learned.notes, *held_out.notes, *test.notes, *([shared] if shared else []))
    return Inputs(learned.rows, test.rows, notes)


def build(
    run: RewardRun,
    *,
    rows: Sequence[Row] | None = None,
    eval_rows: Sequence[Row] | None = None,
    resume: Path | None = None,
) -> RewardJob:
    """Check the inputs, load the weights, join the parts. With `resume`, from its newest complete checkpoint.

    Raises:
        InputError: for whatever the user can mend; before any weight is read, but for pairs that exceed the model's
            positions.
    """
    place = opened(run, resume)
    inputs = read_inputs(run, rows=rows, eval_rows=eval_rows)

    def load(model: Model, *, seed: int) -> Policy:
        policy = load_scorer(model, seed=seed)
        _as_shown(policy.tokenizer, run)
        _set_padding(policy, inputs)
        return policy

    ready = prepared(run, inputs, place, what="pairs", load=load)
    every = (*inputs.pairs, *inputs.held_out)
    require_room(ready.policy, [(each.prompt.row, max(len(each.chosen), len(each.rejected))) for each in every])
    common = parts(ready, inputs, place, ScoreLearner)
    return RewardJob(**vars(common), pairs={each.prompt.row: each for each in inputs.pairs}, held_out=inputs.held_out)


def _as_shown(tokenizer: Any, run: RewardRun) -> Any:
    """The tokenizer with the template that is used, or none: it is saved so, and then judges what was learned."""
    if run.data.template == "none":
        tokenizer.chat_template = None
    return tokenizer


def _set_padding(policy: Policy, inputs: Inputs) -> None:
    """transformers scores the last token that is not padding: the padding token must be one that ends no answer.

    Where the tokenizer's own does, none is set, and transformers takes one answer at a time.
    """
    own = policy.tokenizer.pad_token_id
    ends = {int(ids[-1]) for each in inputs.pairs for ids in (each.chosen, each.rejected)}
    pad = None if own in ends else own
    policy.model.config.pad_token_id = policy.model.config.get_text_config().pad_token_id = pad
