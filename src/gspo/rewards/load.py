"""A reward function, found and tried out before a model exists.

In: `config.RewardRule` and the `Rows` it will judge. Out: a `RewardFunction`. The job calls `load_reward`; `score.py`
calls what it returns.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from difflib import get_close_matches
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from gspo.config import RewardRule
from gspo.errors import InputError
from gspo.rewards.rules import RULES, Rule
from gspo.tasks.data import Rows

Call = Callable[[str, Mapping[str, Any], str], float | None]


@dataclass(frozen=True)
class RewardFunction:
    """What judges an answer."""

    name: str
    """The rule's or the function's name: the key of `Reward.parts`."""
    call: Call
    """(completion, columns of the row, rendered prompt) -> a finite number, or None for no verdict. Raises what the
    user's function raises, and TypeError or ValueError for anything else that it returns."""


def load_reward(rule: RewardRule, rows: Rows) -> RewardFunction:
    """The function of `rule`, checked on the real rows and called once.

    Its first parameter takes the completion. The others are named after the columns that they read; one with a
    default may lack its column, and keeps its default in rows where the column is null. `**kwargs` takes all columns. A
    parameter `rendered_prompt` takes the prompt as the model saw it.

    Raises:
        InputError: no such rule, file or function; an argument that cannot be given; a null column or an answer
            that the rule cannot use; a trial call (first row, empty completion) that raises or returns no number.
    """
    built_in = isinstance(rule.function, str) and rule.function in RULES
    function = _built_in(str(rule.function), rule, rows) if built_in else _own(rule, rows)
    _try(function, rows)
    return function


# ------------------------------------------------------------------------------ built-in rules


def _built_in(name: str, rule: RewardRule, rows: Rows) -> RewardFunction:
    entry = RULES[name]
    where = f"reward={name}"
    parameters = inspect.signature(entry.function).parameters
    fixed: dict[str, Any] = {}
    if "pattern" in parameters and rule.pattern is not None:
        fixed["pattern"] = _compilable(rule.pattern, where)
    elif "pattern" in parameters and parameters["pattern"].default is inspect.Parameter.empty:
        raise InputError(f"{where}: needs reward.pattern, a regular expression")
    elif rule.pattern is not None:
        raise InputError(f"{where}: does not read reward.pattern; the rules regex and format do")
    if "answer" not in parameters:
        _no_answer_key(rule, where)
        return RewardFunction(name, _bound(entry.function, {}, fixed, rendered="rendered_prompt" in parameters))
    _require_columns({"answer": rule.answer}, rows, f"{where} (reward.answer={rule.answer})")
    _require_usable(entry, rule.answer, rows, where)
    return RewardFunction(name, _bound(entry.function, {"answer": rule.answer}, fixed))


def _compilable(pattern: str, where: str) -> str:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise InputError(f"{where}: reward.pattern={pattern!r} is not a regular expression: {error}") from error
    return pattern


def _no_answer_key(rule: RewardRule, where: str) -> None:
    if rule.answer != RewardRule.model_fields["answer"].default:
        raise InputError(
            f"{where}: does not read reward.answer={rule.answer}, which is for the rules exact, number and boxed"
        )


def _require_usable(entry: Rule, column: str, rows: Rows, where: str) -> None:
    unusable = [i for i, row in enumerate(rows.rows) if not entry.usable(row[column])]
    if unusable:
        first = str(rows.rows[unusable[0]][column])
        shown = repr(first if len(first) <= 80 else first[:79] + "…")
        raise InputError(
            f"{where}: {rows.name}: column {column!r} must be {entry.wants}, and is not in {rows.places(unusable)}; the first is {shown}"
        )


# ------------------------------------------------------------------------------ the user's functions


def _own(rule: RewardRule, rows: Rows) -> RewardFunction:
    found = _from_file(rule.function) if isinstance(rule.function, str) else rule.function
    name = str(getattr(found, "__name__", type(found).__name__))
    where = f"reward={rule.function}" if isinstance(rule.function, str) else f"reward function {name}"
    if not callable(found):
        raise InputError(f"{where}: is {type(found).__name__}, not a function")
    if inspect.iscoroutinefunction(found) or inspect.iscoroutinefunction(getattr(found, "__call__", None)):  # noqa: B004
        raise InputError(f"{where}: is async; write it as a plain function (completion, **columns) -> float | None")
    if rule.pattern is not None:
        raise InputError(f"{where}: does not read reward.pattern; the rules regex and format do")
    _no_answer_key(rule, where)
    return RewardFunction(name, _with_columns(found, rows, where))


def _from_file(function: str) -> Any:
    """The object that `file.py:name` names."""
    file, _, name = function.rpartition(":") if ":" in function else (function, "", "")
    if not name and not file.endswith(".py"):
        near = get_close_matches(function, RULES, n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"reward={function}: no such rule.{hint} There are {', '.join(RULES)}; your own function is written file.py:name"
        )
    if file == "python":
        raise InputError(
            f"reward={function}: this function was given from Python, so the command line does not have it: "
            "write it as file.py:name, or go on with gspo.train(resume=DIR, reward=function)"
        )
    path = Path(file)
    if not path.is_file():
        near = get_close_matches(path.name, [entry.name for entry in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else f" (the current folder is {Path.cwd()})"
        raise InputError(f"reward={function}: no such file: {path}{hint}")
    module = _import(path, function)
    own = [
        key
        for key, value in vars(module).items()
        if callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    if not name or not hasattr(module, name):
        near = get_close_matches(name, own, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(own) or 'no function'}"
        what = f"no function {name!r} in {path}" if name else f"name the function: {path}:NAME"
        raise InputError(f"reward={function}: {what}{hint}")
    return getattr(module, name)


def _import(path: Path, function: str) -> ModuleType:
    """Run the file as a module of its own. Compiled from its text: Python's bytecode cache goes by whole seconds."""
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(f"gspo_reward_{path.stem}", path)
    if spec is None:
        raise InputError(f"reward={function}: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module
    try:
        with _importable(path.parent):
            exec(compile(path.read_bytes(), str(path), "exec"), vars(module))
    except (Exception, SystemExit) as error:
        raise InputError(f"reward={function}: importing {path} failed:\n{last_lines(error)}") from error
    return module


@contextmanager
def _importable(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))


def _with_columns(function: Callable[..., Any], rows: Rows, where: str) -> Call:
    """`function` with the columns that its parameters name. Raises InputError if one cannot be given."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except ValueError as error:
        raise InputError(
            f"{where}: its parameters cannot be read ({error}); wrap it in a function (completion, **columns)"
        ) from error
    kinds = inspect.Parameter
    if not parameters or parameters[0].kind in (kinds.KEYWORD_ONLY, kinds.VAR_KEYWORD):
        raise InputError(f"{where}: its first parameter must take the completion, as in (completion, **columns)")
    first, *others = parameters
    if positional := [p.name for p in others if p.kind is kinds.POSITIONAL_ONLY]:
        raise InputError(
            f"{where}: columns are passed by name, and {', '.join(positional)} can only be passed by position"
        )
    named = [p for p in others if p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)]
    rendered = any(p.name == "rendered_prompt" for p in named)
    if rendered and "rendered_prompt" in rows.columns:
        raise InputError(
            f"{where}: rendered_prompt is the prompt as the model saw it, and cannot name a column too: rename that of {rows.name}"
        )
    named = [p for p in named if p.name != "rendered_prompt"]
    required = [p.name for p in named if p.default is kinds.empty]
    _require_columns({name: name for name in required}, rows, where)
    takes_all = any(p.kind is kinds.VAR_KEYWORD for p in others)
    if takes_all and first.kind is kinds.POSITIONAL_OR_KEYWORD and first.name in rows.columns:
        raise InputError(
            f"{where}: its first parameter {first.name!r}, which takes the completion, has the name of a column, which **kwargs would take too: rename it"
        )
    optional = frozenset(p.name for p in named if p.default is not kinds.empty)
    reads = {p.name: p.name for p in named if p.name in rows.columns}
    reads |= {column: column for column in rows.columns} if takes_all else {}
    return _bound(function, reads, {}, rendered=rendered, optional=optional)


def _require_columns(needs: Mapping[str, str], rows: Rows, where: str) -> None:
    """Every column that is needed exists and is null in no row."""
    if missing := [column for column in needs.values() if column not in rows.columns]:
        near = {column: get_close_matches(column, rows.columns, n=1) for column in missing}
        hints = [
            f"{column!r}" + (f" (did you mean {near[column][0]!r}?)" if near[column] else "") for column in missing
        ]
        raise InputError(f"{where}: needs the column {', '.join(hints)}, and {rows.name} has {', '.join(rows.columns)}")
    for column in needs.values():
        if null := [i for i, row in enumerate(rows.rows) if row[column] is None]:
            raise InputError(
                f"{where}: needs the column {column!r}, which {rows.name} leaves null in {rows.places(null)}"
            )


# ------------------------------------------------------------------------------ the call


def _bound(
    function: Callable[..., Any],
    reads: Mapping[str, str],
    fixed: Mapping[str, Any],
    *,
    rendered: bool = False,
    optional: frozenset[str] = frozenset(),
) -> Call:
    """`function` as (completion, columns, rendered prompt) -> number or None; `reads` gives each parameter's column."""

    def call(completion: str, columns: Mapping[str, Any], rendered_prompt: str) -> float | None:
        given = {
            # A copy: a function that changes a list would change the data that later answers are judged on.
            name: deepcopy(columns[column])
            for name, column in reads.items()
            if name not in optional or columns[column] is not None
        }
        if rendered:
            given["rendered_prompt"] = rendered_prompt
        return _verdict(function(completion, **given, **fixed))

    return call


_LARGEST = 1e30
"""Rewards are squared and summed; beyond this float64 would overflow, and no scale of rewards needs it."""


def _verdict(value: object) -> float | None:
    """None, or a finite number as float; bool and numpy's scalars are numbers.

    Raises:
        TypeError: anything else. ValueError: nan or infinite.
    """
    if value is None:
        return None
    if not isinstance(value, Real | np.bool_):
        hint = (
            "; a reward function judges one completion" if isinstance(value, list | tuple | dict | np.ndarray) else ""
        )
        raise TypeError(
            f"the reward function returned {type(value).__name__} {value!r:.80}, not a number or None{hint}"
        )
    number = float(value)
    if not abs(number) <= _LARGEST:  # nan is not
        raise ValueError(
            f"the reward function returned {value}: a reward is finite, within {_LARGEST:g} of 0, or None where there is no verdict"
        )
    return number


def _try(function: RewardFunction, rows: Rows) -> None:
    try:
        function.call("", rows.rows[0], "")
    except (Exception, SystemExit) as error:
        raise InputError(
            f"reward function {function.name}: a trial call with {rows.name}: {rows.place(0)} and an empty completion failed:\n{last_lines(error)}"
        ) from error


def last_lines(error: BaseException) -> str:
    """The end of a traceback: the frame that raised, and the message."""
    return "".join(traceback.format_exception(error)[-3:]).rstrip()
