"""The tasks that come with a name: `addition:1-9`, `sort:8`, `preferences:5`, `reasoning-gym:chain_sum`.

In: the words of `data.source` or `eval.source`. Out: the task, if they name one. `tasks/data.py` calls `find`.
"""

from __future__ import annotations

from collections.abc import Callable
from difflib import get_close_matches

from gspo.errors import InputError
from gspo.tasks import addition, calculator, gym, preferences, sort
from gspo.tasks.task import Task

TASKS: dict[str, Callable[[str], Task]] = {
    "addition": addition.parse,
    "calculator": calculator.parse,
    "sort": sort.parse,
    "preferences": preferences.parse,
    gym.NAME: gym.parse,
}
"""Name -> what reads the words after the colon. How their answers are judged stands in `config.RULES_OF_TASKS`."""


def find(source: str) -> Task | None:
    """The task that `source` names, or None. Raises InputError for one with words that it does not take."""
    name, _, arguments = source.partition(":")
    return TASKS[name](arguments) if name in TASKS else None


def refuse_near(source: str) -> None:
    """Raise InputError if `source` looks like the name of a task, misspelt."""
    name, colon, arguments = source.partition(":")
    if near := get_close_matches(name.lower(), TASKS, n=1, cutoff=0.75):
        raise InputError(f"data.source={source}: no such task; did you mean {near[0] + colon + arguments!r}?")
