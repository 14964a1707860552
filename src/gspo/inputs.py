"""Data and rewards, checked before a weight is read: all that a user can get wrong in them is refused here.

In: the configuration, and rows if they come from Python. Out: `Inputs`. `job` and the command `eval` call it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256
from typing import TYPE_CHECKING, Any

from gspo.config import Data, RewardRule, Run
from gspo.conversations.partner import Talks
from gspo.conversations.play import Scene
from gspo.conversations.sources import Stage, find, open_stage, rehearse, seeds, untold, voice
from gspo.errors import InputError
from gspo.models.load import load_tokenizer
from gspo.rewards.call import FromFile
from gspo.rewards.load import Found, load, open_scorers
from gspo.rewards.ready import Around
from gspo.rewards.runner import Pool
from gspo.rewards.score import Scorer
from gspo.stage_config import Sft
from gspo.tasks.data import Rows, held_out_rows, overlap, read_rows, repeated
from gspo.tasks.identity import data_sha256
from gspo.tasks.render import render, require_assistant, uses_template
from gspo.types import Prompt

if TYPE_CHECKING:
    pass

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
    pools: tuple[Pool, ...] = ()
    """The processes of reward functions and environments, if they need any."""
    talks: Talks | None = None
    """Conversations about the prompts; None: an answer is all."""
    held_out_talks: Talks | None = None
    files: tuple[FromFile, ...] = ()
    """Of rewards, tools and environment: the user's own."""

    def close(self) -> None:
        """End the processes that were started."""
        for pool in self.pools:
            pool.close()

    @property
    def longest(self) -> Prompt:
        return max((*self.prompts, *self.held_out), key=lambda prompt: len(prompt.token_ids))

    @cached_property
    def sha256(self) -> Mapping[str, str]:
        """Of all columns of the rows, those to train on and those held out: a resumed run has to find the same."""
        return data_sha256(self.prompts, self.held_out)

    @property
    def code(self) -> dict[str, str]:
        """The sha256 of each of the user's own files."""
        return code_of(self.files)


def code_of(files: Iterable[FromFile]) -> dict[str, str]:
    """The sha256 of each file, by its path."""
    return {str(file.path): sha256(file.source).hexdigest() for file in files}


def changed_code(now: Mapping[str, str], about: Mapping[str, Any] | None) -> list[str]:
    """What there is to say about files that are not what they were when the run was started, which `about` tells of; None: it is new."""
    then = {} if about is None else about.get("code") or {}
    return [
        f"{path} is not what the run was started with: from here on answers are judged or spoken with by what it says now, "
        "and rewards before and after may not compare"
        for path, found in now.items()
        if about is not None and then.get(path) != found
    ]


def read_inputs(run: Run, *, rows: Sequence[Row] | None = None, eval_rows: Sequence[Row] | None = None) -> Inputs:
    """Rows, reward functions and rendered prompts. Raises InputError for anything that cannot be used."""
    if rows is None and run.data.source == FROM_PYTHON:
        raise InputError(
            "the rows of this run were given from Python, so the command line does not have them: "
            "go on with gspo.train(resume=DIR, data=rows, reward=function)"
        )
    data, held_out = _rows(run, rows, eval_rows)
    tokenizer = load_tokenizer(run.model)
    found = find(run, tokenizer)
    if found is None or run.talk is None:
        return _judged(run, tokenizer, data, held_out)
    stage = open_stage(found, run.talk, run.judging)
    try:
        return _judged(run, tokenizer, data, held_out, stage)
    except BaseException:
        stage.pool.close()
        raise


def _rows(run: Run, rows: Sequence[Row] | None, eval_rows: Sequence[Row] | None) -> tuple[Rows, Rows | None]:
    """Those to train on, and those held out. Their prompts are still to be made if an environment makes them."""
    talk = run.talk
    if talk is not None and talk.environment == run.data.source and rows is None:
        source = run.data.source
        own = (
            seeds(source, "held_out", run.eval.limit) if run.eval.source is None else held_out_rows(run.data, run.eval)
        )
        return seeds(source, "train", run.data.limit), own
    check = None if talk is None or talk.environment is None else _as_they_are
    data = read_rows(run.data, rows=rows, check=check)
    if eval_rows is not None:
        limited = run.data.model_copy(update={"limit": run.eval.limit})
        return data, read_rows(limited, rows=eval_rows, check=check)
    return data, held_out_rows(run.data, run.eval, train=data, check=check)


def _as_they_are(rows: Rows) -> Rows:
    if not len(rows):
        raise InputError(f"{rows.name}: no rows")
    return rows


@dataclass
class _Side:
    """One set of rows on its way to the engine."""

    rows: Rows
    scenes: dict[int, Scene]
    rules: Sequence[RewardRule]


def _judged(run: Run, tokenizer: Any, data: Rows, held_out: Rows | None, stage: Stage | None = None) -> Inputs:
    sides = [_Side(data, {}, run.reward)]
    if held_out is not None:
        sides.append(_Side(held_out, {}, run.eval.reward or run.reward))
    alike = _alike([side.rows for side in sides], run.data)
    if stage is not None:
        for side in sides:
            side.rows, side.scenes = stage.begin(side.rows, run.data)
    around = replace(surroundings(run, sides[0].rows), environment=stage is not None and stage.found.rewards)
    sets = [(load(side.rules, replace(around, rows=side.rows)), side.rows) for side in sides]
    tools = () if stage is None else stage.found.tools
    for side in sides:
        require_assistant(side.rows, tokenizer, run.data)
    shown = [render(side.rows, tokenizer, run.data, tools) for side in sides]
    notes = [note for side, rendered in zip(sides, shown, strict=True) for note in (*side.rows.notes, *rendered.notes)]
    notes += alike
    notes += dict.fromkeys(note for found, _ in sets for each in found for note in each.ready.notes)
    talks: list[Talks | None] = [None, None]
    if stage is not None:
        template = uses_template(sides[0].rows, tokenizer, run.data)
        speech = voice(tokenizer, stage.found, stage.limits, template)
        notes += filter(None, [rehearse(speech, shown[0].prompts[0]), untold(stage.found, template)])
        talks = [stage.talks(side.scenes, speech) for side in sides]
    files = [each.source for found, _ in sets for each in found if each.source is not None]
    scorers, pool = open_scorers(sets, run.judging)  # last, so that nothing refused leaves a process behind
    pools = (*([] if pool is None else [pool]), *([] if stage is None else [stage.pool]))
    test = shown[1].prompts if len(sides) > 1 else ()
    return Inputs(
        prompts=shown[0].prompts,
        reward=scorers[0],
        held_out=test,
        held_out_reward=scorers[-1],
        notes=tuple(notes),
        tokenizer=tokenizer,
        found=tuple(sets[0][0]),
        pools=pools,
        talks=talks[0],
        held_out_talks=talks[-1],
        files=(*files, *(() if stage is None else stage.found.files)),
    )


def _alike(sides: Sequence[Rows], data: Data) -> list[str]:
    """Notes on rows that ask the same. An environment may begin alike where seeds or rows are not: what it says is not compared."""
    if any(row.get(data.prompt) is None for rows in sides for row in rows.rows):
        return []
    shared = [overlap(sides[0], rows, data) for rows in sides[1:]]
    return [*filter(None, (repeated(sides[0], data.prompt), *shared))]


def surroundings(run: Run | Sft, rows: Rows) -> Around:
    """What the rewards of a run may depend on beside their arguments."""
    longest = run.longest if isinstance(run, Run) else run.sampling.max_new_tokens
    return Around(rows, run.data.prompt, run.data.system, longest, run.judging)
