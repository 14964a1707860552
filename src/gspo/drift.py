"""How far the policy has gone from where it started, without the weights of the start: answers that it wrote then are kept.

KL(start || now) is the mean over their tokens of log start - log now, as the engine wrote the first and the trainer
computes the second: one forward of a few answers at each evaluation. `job` calls `sample_start` before the first step,
`kl_to_start` at evaluations; `build` reads the answers of a resumed run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from gspo.ahead import read_ahead, write_ahead
from gspo.batch import answers_batch
from gspo.drawing import Drawn
from gspo.engines.engine import Engine, Request
from gspo.errors import DivergedError, InputError
from gspo.evaluate import EVAL_STREAM
from gspo.learner import Learner
from gspo.types import Group, Prompt

ANSWERS = 32
"""Held-out prompts that are answered once by the start: enough to tell 0.1 from 2 nats a token."""
_FOLDER = "start"


def sample_start(engine: Engine, prompts: Sequence[Prompt], folder: Path) -> list[Group]:
    """Answers of the weights as they are, kept in the run folder for a run that is resumed."""
    for prompt in prompts[:ANSWERS]:
        engine.submit(Request(prompt=prompt, ordinal=prompt.row, count=1, stream=EVAL_STREAM))
    groups = sorted(engine.collect(), key=lambda group: group.ordinal)
    (folder / _FOLDER).mkdir(exist_ok=True)
    write_ahead(folder / _FOLDER, [Drawn(groups)])
    return groups


def read_start(folder: Path, prompts: Sequence[Prompt]) -> list[Group]:
    """What `sample_start` kept. Raises InputError if it is missing, damaged or of other prompts."""
    try:
        return read_ahead(folder / _FOLDER, prompts, 1)[0].groups
    except InputError as error:
        raise InputError(
            f"{folder / _FOLDER} is missing or damaged: the run cannot be resumed without the answers of its start, which the guard measures "
            "eval/kl_start with. Put it back as it was, or start a new run with the checkpoint as its model"
        ) from error


def kl_to_start(learner: Learner, start: Sequence[Group], max_tokens: int) -> float | None:
    """KL(start || now) in nats a token, infinite where the weights give no number; None without answers of the start."""
    if not start:
        return None
    batch = learner.placed(answers_batch(start, max_tokens))
    try:
        now_N = learner.logprobs(learner.model, batch)
    except DivergedError:
        return math.inf
    return float((batch.rollout_logprob_N.double() - now_N.double()).mean())
