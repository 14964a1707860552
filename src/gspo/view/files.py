"""A run's files, read for people: the journal and the rollout record, as they are now, of a run that may still be going on.

In: the folder of a run. Out: lines of the journal and `Answer`s by group. `show`, `report` and `rescore` read through it.
No torch.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import groupby, takewhile
from pathlib import Path
from typing import Any

from gspo.errors import InputError
from gspo.runfile import read_lines, read_settings

Metrics = dict[str, Any]


@dataclass(frozen=True)
class Answer:
    """One rollout of the record."""

    row: int
    ordinal: int
    index: int
    prompt: str
    columns: Mapping[str, Any]
    text: str
    prompt_ids: Sequence[int]
    ids: Sequence[int]
    mask: Sequence[int]
    """1 where the policy sampled the token."""
    stop: str
    reward: float | None
    reward_parts: Mapping[str, float | None]
    reward_error: str | None
    segments: Sequence[tuple[int, int | None]] = ()
    """Tokens of each segment, and the one that it continues. Empty in the record of older versions, as are those below."""
    prompt_messages: Sequence[Mapping[str, str]] = ()
    messages: Sequence[Mapping[str, str]] = ()
    """What followed the prompt in a conversation."""
    earned: float | None = None
    advantage: float | None = None
    """None: of an evaluation."""
    clipped: float | None = None
    """Share of its tokens whose gradient the gate took; None: not trained on."""

    @property
    def sampled(self) -> int:
        """Tokens that the policy wrote: in a conversation, others wrote some."""
        return sum(self.mask)

    @property
    def turns(self) -> list[tuple[str, str]]:
        """Role and words of each message of a conversation; nothing if one answer was all of it."""
        said = [(str(message["role"]), str(message["content"]).strip()) for message in self.messages]
        return said if len(said) > 1 else []


_FIELDS = tuple(field.name for field in fields(Answer))


def require_run(folder: Path) -> None:
    """Raise InputError if there is no run in `folder`."""
    if not (folder / "run.yaml").is_file():
        run = folder.resolve().parent.parent
        if folder.resolve().name.isdigit() and (run / "run.yaml").is_file():
            raise InputError(f"{folder}: a checkpoint, not a run: give the run, {run}")
        raise InputError(f"{folder}: no run here (there is no run.yaml). Give the folder of a run, as in runs/demo")


def settings_of(folder: Path) -> dict[str, Any]:
    """run.yaml as it stands. Raises InputError if it is damaged."""
    require_run(folder)
    return read_settings(folder / "run.yaml")


@contextmanager
def taken_as_whole(folder: Path) -> Iterator[None]:
    """Inside, run.yaml and the lines of the journal are taken to hold what runs write. Raises InputError if they do not."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{folder}: run.yaml or journal.jsonl is damaged: it lacks what a run writes ({type(error).__name__}: {error})"
        ) from error


def journal(folder: Path) -> list[Metrics]:
    """The complete lines of the journal. Raises InputError if there is no run, or a line is damaged."""
    require_run(folder)
    return read_lines(folder / "journal.jsonl")


def record_file(folder: Path, step: int, *, evaluation: bool = False) -> Path:
    """The answers of a step, or of the evaluation after it. Raises InputError that names what there is."""
    name = "eval-" if evaluation else ""
    path = folder / "rollouts" / f"{name}{step:08d}.jsonl.gz"
    if not path.is_file():
        found = ", ".join(str(n) for n in steps_recorded(folder, evaluation=evaluation)) or "none"
        what = "evaluation after step" if evaluation else "step"
        raise InputError(f"{folder}: no answers of {what} {step} are recorded; there are those of {found}")
    return path


def steps_recorded(folder: Path, *, evaluation: bool = False) -> list[int]:
    """Steps whose answers are in the record, ascending."""
    name = "eval-" if evaluation else ""
    files = (folder / "rollouts").glob(name + "[0-9]" * 8 + ".jsonl.gz")
    return sorted(int(path.name.removeprefix(name)[:8]) for path in files)


def groups_in(path: Path) -> list[list[Answer]]:
    """The answers of a file of the record, those to one draw of a prompt together."""
    return [list(group) for _, group in groupby(answers_in(path), key=lambda answer: answer.ordinal)]


def answers_in(path: Path) -> Iterator[Answer]:
    """The answers of a file of the record, in their order. Raises InputError if it is damaged."""
    empty = True
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            for line in file:
                empty = False
                plain = json.loads(line)
                yield Answer(**{name: plain[name] for name in _FIELDS if name in plain})
    except (OSError, EOFError, ValueError, KeyError, TypeError, zlib.error) as error:
        raise InputError(f"{path}: damaged, or cut off while it was written ({error})") from error
    if empty:
        raise InputError(f"{path}: damaged: there is not one answer in it")


_LINES = 4
"""As many lines have to be the same before they are worth a place of their own."""


def shared_beginning(prompts: Sequence[str]) -> str:
    """The whole lines that all of several prompts begin with (a description of tools, say); empty if they are few."""
    if len(set(prompts)) < 2:
        return ""
    lines = zip(*(prompt.splitlines(keepends=True) for prompt in prompts), strict=False)
    same = [each[0] for each in takewhile(lambda each: len(set(each)) == 1, lines)]
    return "".join(same) if len(same) >= _LINES else ""
