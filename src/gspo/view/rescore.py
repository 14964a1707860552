"""Answers of a run judged again, by another reward: what would have changed.

In: the folder of a run and rules. Out: lines that compare old with new rewards, and a file if one is asked for; nothing is
written into the run. The command `rescore` calls it. Functions run in the pool, as in training.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from gspo.algorithms.advantages import carries_signal
from gspo.config import Judging, RewardRule
from gspo.errors import InputError
from gspo.rewards.load import load, open_scorers
from gspo.rewards.ready import Around
from gspo.rewards.score import Scorer
from gspo.settings import check
from gspo.tasks.data import Rows
from gspo.types import Group, Prompt, Rollout, Segment, Stop
from gspo.view import files
from gspo.view.files import Answer


@dataclass(frozen=True)
class Rescored:
    """One answer with both rewards."""

    step: int
    answer: Answer
    new: float | None


def rescore(
    folder: Path, rules: Sequence[RewardRule], judging: Judging, *, evaluation: bool, out: Path | None
) -> list[str]:
    """Judge every recorded answer of `folder` again; returns the comparison, a line a step.

    Raises:
        InputError: no run, nothing recorded, a reward that cannot be used with its columns, or an `out` that exists or
            lies in the run, or cannot be written.
        RunError: the function failed on more of a step's answers than `judging.max_failed`.
    """
    steps = files.steps_recorded(folder, evaluation=evaluation)
    files.require_run(folder)
    if not steps:
        raise InputError(f"{folder}: no answers are recorded{' of evaluations' if evaluation else ''}")
    if out is not None:
        _require_new(out, folder)
    recorded = {step: files.groups_in(files.record_file(folder, step, evaluation=evaluation)) for step in steps}
    settings = files.settings_of(folder)
    rows = _rows(folder, recorded.values())
    found = load(rules, _around(rows, settings, judging, recorded.values()))
    (scorer,), pool = open_scorers([(found, rows)], judging)
    try:
        judged = {step: _judged(step, groups, scorer) for step, groups in recorded.items()}
    finally:
        if pool is not None:
            pool.close()
    if out is not None:
        _write(out, [one for each in judged.values() for one in each])
    return [
        *(_line(step, each) for step, each in judged.items()),
        _total([one for each in judged.values() for one in each]),
    ]


def _around(rows: Rows, settings: Mapping[str, Any], judging: Judging, steps: Iterable[list[list[Answer]]]) -> Around:
    """What the rewards may depend on. There was an environment with rewards if it gave any."""
    data, limit = settings["data"], settings["sampling"]["max_new_tokens"]
    if "algorithm" in settings:  # the other stages hold no conversations
        limit = check({key: value for key, value in settings.items() if key != "about"}, "run.yaml").longest
    earned = any(answer.earned is not None for groups in steps for group in groups for answer in group)
    return Around(rows, data["prompt"], data["system"], limit, judging, environment=earned)


def _require_new(out: Path, folder: Path) -> None:
    """Raise InputError, before anything is judged, if `out` cannot be written."""
    if out.exists() or folder.resolve() in out.resolve().parents:
        raise InputError(f"{out}: exists, or lies in the run: give another file")
    try:
        out.open("x").close()
        out.unlink()
    except OSError as error:
        raise InputError(f"{out}: cannot be written ({error.strerror}): give a file in a folder that exists") from error


def _rows(folder: Path, steps: Iterable[list[list[Answer]]]) -> Rows:
    """The columns of every answer's row, as far as the record holds them."""
    columns: dict[int, dict[str, object]] = {}
    for groups in steps:
        for group in groups:
            columns.setdefault(group[0].row, dict(group[0].columns))
    names = tuple(dict.fromkeys(name for row in columns.values() for name in row))
    rows = tuple({name: row.get(name) for name in names} for _, row in sorted(columns.items()))
    return Rows(f"{folder}/rollouts", rows, names)


def _judged(step: int, groups: Sequence[Sequence[Answer]], scorer: Scorer) -> list[Rescored]:
    judging = scorer.begin()
    for answers in groups:
        judging.add(_group(answers))
    again = [r.reward.value if r.reward else None for group in judging.finish() for r in group.rollouts]
    return [Rescored(step, a, new) for a, new in zip((a for group in groups for a in group), again, strict=True)]


def _group(answers: Sequence[Answer]) -> Group:
    """The answers as the rewards were given them: text, length and row, and of a conversation all that was said in it."""
    first = answers[0]
    prompt = Prompt(
        first.row, first.prompt, np.array(first.prompt_ids), first.columns, messages=tuple(first.prompt_messages)
    )
    return Group(prompt, first.ordinal, tuple(_rollout(answer) for answer in answers))


def _rollout(a: Answer) -> Rollout:
    stop = Stop(a.stop)
    error = a.reward_error if stop is Stop.ERROR else None
    rollout = Rollout(a.index, _segments(a), a.text, stop, versions=(0, 0), error=error)
    return replace(rollout, messages=tuple(a.messages), earned=a.earned)


def _segments(a: Answer) -> tuple[Segment, ...]:
    found, start = [], 0
    for tokens, parent in a.segments or [(len(a.ids), None)]:
        ids, mask = (each[start : start + tokens] for each in (a.ids, a.mask))
        found.append(Segment(np.array(ids), np.array(mask, dtype=bool), np.zeros(tokens, dtype=np.float32), parent))
        start += tokens
    return tuple(found)


def _write(out: Path, judged: Sequence[Rescored]) -> None:
    with out.open("w", encoding="utf-8") as file:
        for one in judged:
            a = one.answer
            line = {
                "step": one.step,
                "row": a.row,
                "ordinal": a.ordinal,
                "index": a.index,
                "old": a.reward,
                "new": one.new,
            }
            file.write(json.dumps({**line, "text": a.text}, ensure_ascii=False) + "\n")


def _line(step: int, judged: Sequence[Rescored]) -> str:
    return f"step {step:>6}  {_compared(judged)}"


def _total(judged: Sequence[Rescored]) -> str:
    return f"all         {_compared(judged)}"


def _compared(judged: Sequence[Rescored]) -> str:
    old, new = [one.answer.reward for one in judged], [one.new for one in judged]
    changed = sum(not _same(a, b) for a, b in zip(old, new, strict=True))
    unjudged = sum(value is None for value in new)
    said = f"reward {_mean(old)} -> {_mean(new)}  {changed} of {len(judged)} answers differ"
    said += f"  groups with signal {_signal(judged, lambda o: o.answer.reward)} -> {_signal(judged, lambda o: o.new)}"
    return said + (f"  {unjudged} without a verdict" if unjudged else "")


def _same(a: float | None, b: float | None) -> bool:
    return a is b or (a is not None and b is not None and abs(a - b) <= 1e-9)


def _mean(values: Sequence[float | None]) -> str:
    judged = [value for value in values if value is not None]
    return f"{sum(judged) / len(judged):.3f}" if judged else "-"


def _signal(judged: Sequence[Rescored], value: Callable[[Rescored], float | None]) -> int:
    groups: dict[tuple[int, int], list[float]] = {}
    for one in judged:
        found = value(one)
        groups.setdefault((one.step, one.answer.ordinal), []).extend([] if found is None else [found])
    return sum(len(each) > 1 and carries_signal(each) for each in groups.values())
