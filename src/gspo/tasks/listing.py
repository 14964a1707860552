"""The tasks that come with a name, in words: what `gspo tasks` prints.

In: nothing, or the name of a task. Out: lines. The command line calls `tasks` and `shown`.
"""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches

from gspo.config import RULES_OF_TASKS
from gspo.errors import InputError
from gspo.tasks import builtin, gym
from gspo.tasks.task import Task

_LONGEST = 600
_ABOUT = {
    "addition:LOW-HIGH": "sums of two whole numbers from LOW to HIGH; addition alone is 1-20",
    "calculator:LOW-HIGH": "products of two whole numbers, to be worked out with conversation.tools=calculator",
    "preferences:N": "N letters to be put in order, with demonstrations for gspo sft and preferences for gspo reward",
    "sort:N": "N letters to be sorted by insertion, every step written out; sort:5,8 gives both lengths in turn",
}


def tasks() -> Iterator[str]:
    """A line for each task, and how it is used."""
    yield "Train on a task: gspo train TASK [key=value ...]. In a recipe: data: TASK. Its rows: gspo tasks TASK"
    yield ""
    width = max(map(len, _ABOUT))
    for words, about in _ABOUT.items():
        rule = RULES_OF_TASKS[words.partition(":")[0]]
        yield f"{words:<{width}}  {about} (reward={rule})"
    yield ""
    if not gym.installed():
        yield f"{gym.NAME}:NAME  a hundred more, of the package reasoning-gym: pip install 'gspo[{gym.NAME}]'"
        return
    names = gym.names()
    yield f"{gym.NAME}:NAME, {len(names)} tasks, each judged by its own scorer (reward={RULES_OF_TASKS[gym.NAME]});"
    yield f"with settings of its own: {gym.NAME}:chain_sum,min_terms=2,max_terms=3"
    width = max(map(len, names))
    for name in names:
        yield f"  {name:<{width}}  {gym.about(name)}"


def shown(words: str, rows: int) -> Iterator[str]:
    """The first rows of a task to train on, with their answers. Raises InputError if there is no such task."""
    found, notes = _task(words).rows("train", limit=rows)
    for i, row in enumerate(found):
        yield f"row {i}"
        yield f"  prompt: {_short(row['prompt'])}"
        yield f"  answer: {_short(row['answer'])}"
    yield from (f"note: {note}" for note in notes)
    name = words.partition(":")[0]
    if name == gym.NAME and (settings := gym.parse(words.partition(":")[2]).choices()):
        yield f"settings: {', '.join(f'{key}={value}' for key, value in settings.items())}"
    yield f"judged by reward={RULES_OF_TASKS[name]}; train on it: gspo train {words}"


def _task(words: str) -> Task:
    if (task := builtin.find(words)) is not None:
        return task
    builtin.refuse_near(words)
    if gym.installed() and (near := get_close_matches(words, gym.names(), n=1)):
        raise InputError(f"{words}: no such task; did you mean {gym.NAME}:{near[0]}?")
    raise InputError(f"{words}: no such task; `gspo tasks` lists them")


def _short(value: object) -> str:
    text = str(value).replace("\n", "\n          ")
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]} ... ({len(str(value))} characters)"
