"""Rewards found, checked on the real rows and tried out before a model exists.

In: `config.RewardRule`s and the `Rows` that they will judge. Out: a `Scorer` for each set of rows, and the `Pool` of
processes behind them. `inputs` calls `load` and `open_scorers`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from gspo.config import Judging, RewardRule
from gspo.errors import InputError
from gspo.rewards.call import Call, FromFile, Item
from gspo.rewards.own import own
from gspo.rewards.process import Pooled
from gspo.rewards.ready import READY, Around, Ready, unusable_words
from gspo.rewards.runner import Pool
from gspo.rewards.score import FAILED, AtOnce, Here, InPool, Judge, Place, Scorer
from gspo.tasks.data import Rows

_MOST_WORKERS = 8


@dataclass(frozen=True)
class Found:
    """A reward that is not running yet."""

    name: str
    weight: float
    ready: Ready
    where: str
    """How the user named it, for messages."""
    source: FromFile | None = None

    @property
    def group(self) -> bool:
        return self.ready.call is not None and self.ready.call.group

    @property
    def conversation(self) -> bool:
        return self.ready.call is not None and "conversation" in self.ready.call.special

    @property
    def calls(self) -> list[Call]:
        """What the workers have to know."""
        call = None if self.ready.bounded else self.ready.call
        return [each for each in (call, self.ready.check) if each is not None]


def load(rules: Sequence[RewardRule], around: Around) -> list[Found]:
    """The functions of the rules, checked against the columns.

    Raises:
        InputError: no such rule, file or function; an argument that cannot be given; a null column or an answer that
            the rule cannot use.
    """
    found: list[Found] = []
    for rule in rules:
        name, _, argument = rule.function.partition(":") if isinstance(rule.function, str) else ("", "", "")
        if name in READY:
            where = f"reward={rule.function}"
            ready, source = READY[name](where, argument or None, around), None
        else:
            name, call, source = own(rule.function, around.rows, READY)
            where, ready = f"reward function {name}", Ready(call)
        taken = [other.name for other in found]
        unique = next(n for n in (name, *(f"{name}_{i}" for i in range(2, len(rules) + 2))) if n not in taken)
        found.append(Found(unique, rule.weight, ready, where, source))
    return found


def open_scorers(sets: Sequence[tuple[Sequence[Found], Rows]], judging: Judging) -> tuple[list[Scorer], Pool | None]:
    """Start the workers, check what only they can check, and call each function once on its first row.

    Raises:
        InputError: a function that cannot be sent to a worker; a row that cannot be judged; a trial call with an empty
            completion that fails.
    """
    pooled = [Pooled(each.name, call, each.source) for found, _ in sets for each in found for call in each.calls]
    pool = None
    if pooled:
        workers = judging.workers or worker_count()
        pool = Pool(pooled, workers=workers, timeout=judging.timeout, memory_gb=judging.memory_gb)
    indices = {id(function.call): index for index, function in enumerate(pooled)}

    def place(each: Found) -> Place:
        if each.ready.service is not None:
            return AtOnce(each.ready.service)
        assert each.ready.call is not None
        if each.ready.bounded:
            return Here(each.ready.call)
        assert pool is not None
        return InPool(pool, indices[id(each.ready.call)])

    try:
        scorers = []
        for found, rows in sets:
            for each in found:
                if each.ready.check is not None and pool is not None:
                    _require_rows(each, rows, InPool(pool, indices[id(each.ready.check)]))
            judges = [Judge(each.name, each.weight, place(each), each.group, each.conversation) for each in found]
            for judge, each in zip(judges, found, strict=True):
                _try(judge, each, rows)
            scorers.append(Scorer(judges, judging.max_failed))
        return scorers, pool
    except BaseException:
        if pool is not None:
            pool.close()
        raise


def worker_count() -> int:
    """Processes of a pool, if nobody says how many."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(cores, _MOST_WORKERS)


def _require_rows(each: Found, rows: Rows, place: InPool) -> None:
    """Every row passes the check of its reward, in the time of a judgement."""
    items = [Item(("",), (0,), row, "") for row in rows.rows]
    outcomes = place.results(place.submit(items))
    if unusable := [i for i, outcome in enumerate(outcomes) if outcome.values != (1.0,)]:
        assert each.ready.check is not None
        column = each.ready.check.reads["answer"]
        error = outcomes[unusable[0]].error
        because = f":\n{_end(error)}" if error else ""
        raise InputError(f"{each.where}: {unusable_words(rows, column, unusable, each.ready.wants)}{because}")


def _try(judge: Judge, each: Found, rows: Rows) -> None:
    count = 2 if judge.group else 1
    talk = ({"role": "user", "content": ""}, {"role": "assistant", "content": ""})
    trial = Item(("",) * count, (0,) * count, rows.rows[0], "", (talk,) * count, (0.0,) * count)
    outcome = judge.place.results(judge.place.submit([trial]))[0]
    if outcome.status in FAILED:
        raise InputError(
            f"{each.where}: a trial call with {rows.name}: {rows.place(0)} and an empty completion failed:\n{_end(outcome.error)}"
        )


def _end(error: str | None) -> str:
    """The end of a traceback: the frame that raised, and the message."""
    return "\n".join((error or "").strip().splitlines()[-6:])
