"""The ready rewards by name: `math`, or with an argument behind a colon, `math:solution`.

In: the argument, and what surrounds a reward. Out: what `load.py` puts to work. A new ready reward is a function here.
"""

from __future__ import annotations

import importlib.util
import re
import urllib.parse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gspo.config import Judging
from gspo.errors import InputError
from gspo.rewards import classifier, gym, judge, maths, programs, rules, sandbox
from gspo.rewards.call import Call
from gspo.rewards.own import require_columns
from gspo.rewards.score import Service
from gspo.tasks.data import Rows


@dataclass(frozen=True)
class Around:
    """What a reward may depend on beside its argument."""

    rows: Rows
    prompt: str
    """Column of the prompt."""
    system: str | None
    max_new_tokens: int
    judging: Judging
    environment: bool = False
    """There is an environment that gives rewards."""
    services: dict[str, Service] = field(default_factory=dict)
    """By how they were named: training and evaluation share a reward model, and a judge's budget."""

    def shared(self, where: str, make: Callable[[], Service]) -> Service:
        if where not in self.services:
            self.services[where] = make()
        return self.services[where]


@dataclass(frozen=True)
class Ready:
    """A ready reward, checked as far as this process can."""

    call: Call | None = None
    bounded: bool = False
    """Its time is linear in the answer, whatever that is: it need not run where it can be killed."""
    service: Service | None = None
    """In place of a call."""
    check: Call | None = None
    """1 for each row that can be judged; it runs in the pool."""
    wants: str = ""
    """What `check` looks for, in words."""
    notes: tuple[str, ...] = ()
    gold: Callable[[Any], str] | None = None
    """An answer that is right, from what stands in the column that it reads; None if that cannot be known."""


def _column(argument: str | None) -> str:
    return argument or "answer"


def _compared(
    function: Callable[..., float], usable: Callable[[Any], bool], wants: str, gold: Callable[[Any], str] = str
) -> Callable[[str, str | None, Around], Ready]:
    """A rule that compares the completion with a column."""

    def make(where: str, argument: str | None, around: Around) -> Ready:
        rows, column = around.rows, _column(argument)
        require_columns({"answer": column}, rows, where)
        if unusable := [i for i, row in enumerate(rows.rows) if not usable(row[column])]:
            raise InputError(f"{where}: {unusable_words(rows, column, unusable, wants)}")
        return Ready(Call(function, {"answer": column}), bounded=True, gold=gold)

    return make


def unusable_words(rows: Rows, column: str, unusable: list[int], wants: str) -> str:
    """Which rows have an answer that cannot be used, and what the first one is."""
    first = str(rows.rows[unusable[0]][column])
    shown = repr(first if len(first) <= 80 else first[:79] + "…")
    return (
        f"{rows.name}: column {column!r} must be {wants}, and is not in {rows.places(unusable)}; the first is {shown}"
    )


def _in_box(answer: Any) -> str:
    return rf"\boxed{{{rules.gold_of_box(answer).strip().strip('$')}}}"


def _math(where: str, argument: str | None, around: Around) -> Ready:
    require_extra("math_verify", "math", where)
    column = _column(argument)
    require_columns({"answer": column}, around.rows, where)
    reads = {"answer": column}
    return Ready(
        Call(maths.equals, reads, prepare=maths.prepare),
        check=Call(maths.comparable, reads, prepare=maths.prepare),
        wants="a mathematical expression, or a list of them",
        gold=lambda answer: _in_box(answer[0] if isinstance(answer, list | tuple) and answer else answer),
    )


def _reasoning_gym(where: str, argument: str | None, around: Around) -> Ready:
    require_extra("reasoning_gym", "reasoning-gym", where)
    reads = {"prompt": around.prompt, "answer": "answer", "metadata": "metadata", "task": "task"}
    if missing := [column for column in reads.values() if column not in around.rows.columns]:
        raise InputError(
            f"{where}: judges the rows of data=reasoning-gym:NAME, and {around.rows.name} has no column {missing[0]!r}"
        )
    if argument is not None:
        raise InputError(f"{where}: takes no argument: the rows say which task they are of")
    return Ready(
        Call(gym.score, reads, prepare=gym.prepare),
        check=Call(gym.judges, reads, prepare=gym.prepare),
        wants="an answer that the task's own scorer can judge",
    )


def _regex(where: str, argument: str | None, around: Around) -> Ready:
    if not argument:
        raise InputError(f"{where}: needs a regular expression, as in regex:^[0-9]")
    # A pattern may take exponential time: it runs where it can be killed.
    return Ready(Call(rules.regex, fixed={"pattern": _compilable(argument, where)}))


def _format(where: str, argument: str | None, around: Around) -> Ready:
    special = frozenset({"rendered_prompt"})
    if argument is None:
        return Ready(Call(rules.format, special=special), bounded=True)
    return Ready(Call(rules.format, fixed={"pattern": _compilable(argument, where)}, special=special))


def _compilable(pattern: str, where: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{where}: {pattern!r} is not a regular expression: {error}") from error
    return pattern


def _overlong(where: str, argument: str | None, around: Around) -> Ready:
    limit = around.max_new_tokens
    buffer = _count(argument, where, max(1, limit // 5))  # DAPO: 4096 of 20480
    if buffer > limit:
        raise InputError(f"{where}: a buffer of {buffer} tokens is longer than sampling.max_new_tokens={limit}")
    fixed = {"limit": limit, "buffer": buffer}
    return Ready(Call(rules.overlong, fixed=fixed, special=frozenset({"completion_tokens"})), bounded=True)


def _repetition(where: str, argument: str | None, around: Around) -> Ready:
    return Ready(Call(rules.repetition, fixed={"length": _count(argument, where, 4)}), bounded=True)


def _count(argument: str | None, where: str, default: int) -> int:
    if argument is None:
        return default
    if not argument.isascii() or not argument.isdigit() or int(argument) == 0:
        raise InputError(f"{where}: {argument!r} is not a number of 1 or more")
    return int(argument)


def _code(where: str, argument: str | None, around: Around) -> Ready:
    rows, column = around.rows, argument or "tests"
    require_columns({"tests": column}, rows, where)
    if unusable := [i for i, row in enumerate(rows.rows) if programs.read_tests(row[column]) is None]:
        wants = "tests: Python code that asserts, or pairs of input and output"
        raise InputError(f"{where}: {unusable_words(rows, column, unusable, wants)}")
    wall = sandbox.wall(around.judging.allow_unsafe)
    # What hangs is wrong, and not unjudged: it is ended before the pool would end its worker.
    fixed = {"wall": wall, "seconds": 0.8 * around.judging.timeout}
    return Ready(Call(programs.passes, {"tests": column}, fixed), notes=(f"programs run behind {wall.description}",))


def _judge(where: str, argument: str | None, around: Around) -> Ready:
    url, options = _with_options(argument, ("model", "budget", "question"), where)
    if not url.startswith(("http://", "https://")):
        raise InputError(f"{where}: needs the address of an endpoint, as in judge:http://localhost:8000/v1?model=NAME")
    question = judge.QUESTION
    if "question" in options:
        try:
            question = Path(options["question"]).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{where}: the question cannot be read: {error}") from error
    judge.check_question(question, around.rows.rows[0], where)
    budget = _count(options.get("budget"), where, 0) or None

    def make() -> Service:
        base, timeout = url.rstrip("/"), around.judging.timeout
        model = options.get("model") or judge.served_model(base, where, timeout)
        return judge.JudgeModel(base, model, around.prompt, timeout, question, budget)

    return Ready(service=around.shared(where, make))


def _reward_model(where: str, argument: str | None, around: Around) -> Ready:
    name, options = _with_options(argument, ("device",), where)
    if not name:
        raise InputError(f"{where}: needs a model, as in reward_model:FOLDER?device=cuda:1")

    def make() -> Service:
        model, tokenizer = classifier.load_classifier(name, options.get("device"), where)
        made = classifier.RewardModel(name, model, tokenizer, around.prompt, around.system)
        try:
            made.require_shown(around.rows.rows[0][around.prompt])
        except InputError as error:
            raise InputError(f"{where}: {around.rows.name}: {around.rows.place(0)}: {error}") from error
        return made

    return Ready(service=around.shared(where, make))


def _with_options(argument: str | None, known: tuple[str, ...], where: str) -> tuple[str, dict[str, str]]:
    """`ADDRESS?key=value&key=value` taken apart."""
    address, _, query = (argument or "").partition("?")
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if unknown := [key for key in options if key not in known]:
        raise InputError(f"{where}: no such option as {unknown[0]!r}; there are {', '.join(known)}")
    return address, options


def require_extra(module: str, extra: str, where: str) -> None:
    """Raise InputError, which says how to install it, if an optional package is missing."""
    if importlib.util.find_spec(module) is None:
        raise InputError(f"{where}: needs the package {module}, which is not installed: pip install 'gspo[{extra}]'")


def _environment(where: str, argument: str | None, around: Around) -> Ready:
    if not around.environment:
        raise InputError(
            f"{where}: there is no environment that gives rewards: name one, as in conversation.environment=file.py:NAME"
        )
    return Ready(Call(rules.environment, special=frozenset({"earned"})), bounded=True)


_NOT_EMPTY = "text that is not empty"
READY: Mapping[str, Callable[[str, str | None, Around], Ready]] = {
    "exact": _compared(rules.exact, lambda answer: str(answer).strip() != "", _NOT_EMPTY),
    "number": _compared(rules.number, lambda answer: rules.as_number(answer) is not None, "a number and nothing else"),
    "boxed": _compared(rules.boxed, lambda answer: rules.bare(rules.gold_of_box(answer)) != "", _NOT_EMPTY, _in_box),
    "math": _math,
    "reasoning-gym": _reasoning_gym,
    "code": _code,
    "judge": _judge,
    "reward_model": _reward_model,
    "regex": _regex,
    "format": _format,
    "overlong": _overlong,
    "repetition": _repetition,
    "matching": _compared(rules.matching, lambda answer: str(answer) != "", _NOT_EMPTY),
    "environment": _environment,
    "sorted": _compared(
        rules.sorted_list,
        lambda answer: rules.last_list(str(answer)) is not None,
        "text that ends with `:`, a list and `;`",
    ),
}
"""(how the user named it, its argument, what surrounds it) -> Ready. Each raises InputError for what cannot be used."""
