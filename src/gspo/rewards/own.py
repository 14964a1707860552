"""A user's reward function: found in a file or given from Python, and matched with the columns that its parameters name.

In: what the user gave, and the `Rows` that it will judge. Out: a `Call`, and the file that it came from. `load.py` calls
`own`. A file is never run in this process: workers run it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any

from gspo.errors import InputError
from gspo.rewards.call import Call, FromFile, Item
from gspo.rewards.look import Look, Seen
from gspo.rewards.process import Pooled
from gspo.rewards.runner import START_SECONDS, Pool
from gspo.tasks.data import Rows
from gspo.types import Status

SPECIAL = {
    "rendered_prompt": "the prompt as the model saw it",
    "completion_tokens": "the number of tokens of the answer",
    "conversation": "the list of all messages, prompt and answer among them",
    "earned": "what the environment gave for the conversation",
}
"""Parameters that are no columns."""


def own(function: str | Callable[..., Any], rows: Rows, known: Iterable[str]) -> tuple[str, Call, FromFile | None]:
    """The function's name, the call that gives it its columns, and its file.

    Its first parameter takes the completion; if that is named `completions`, all completions of a prompt, and it gives
    back a list. The others are named after the columns that they read; one with a default may lack its column, and keeps
    its default in rows where the column is null. `**kwargs` takes all columns. `SPECIAL` parameters are no columns.

    Raises:
        InputError: no such file or function; a parameter that cannot be given; a null column.
    """
    if isinstance(function, str):
        source, seen = from_file(function, known)
        if not seen.callable:
            raise InputError(f"reward={function}: is {seen.kind}, not a function")
        source = replace(source, asynchronous=seen.asynchronous)
        return seen.name, _with_columns(source, seen.signature, rows, f"reward={function}"), source
    name = str(getattr(function, "__name__", type(function).__name__))
    where = f"reward function {name}"
    if not callable(function):
        raise InputError(f"{where}: is {type(function).__name__}, not a function")
    return name, _with_columns(function, lambda: inspect.signature(function), rows, where), None


# ------------------------------------------------------------------------------ files


def from_file(function: str, known: Iterable[str], key: str = "reward") -> tuple[FromFile, Seen]:
    """The file and function that `file.py:name` names, and what a worker saw of it.

    Raises InputError, which says under which `key` it was named: no such file or name; a file that cannot be run, or that
    has not come to an end within `START_SECONDS`.
    """
    file, _, name = function.rpartition(":") if ":" in function else (function, "", "")
    what = {"reward": "rule"}.get(key, key.rpartition(".")[2].rstrip("s"))
    if not file.endswith(".py") and file != "python":
        head = function.partition(":")[0]
        near = get_close_matches(head, list(known), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise InputError(
            f"{key}={function}: no such {what}.{hint} There are {', '.join(known)}; your own is written file.py:name"
        )
    if file == "python":
        raise InputError(
            f"{key}={function}: this function was given from Python, so the command line does not have it: "
            f"write it as file.py:name, or go on with gspo.train(resume=DIR, {key.partition('.')[0]}=...)"
        )
    path = Path(file)
    if not path.is_file():
        near = get_close_matches(path.name, [entry.name for entry in path.parent.glob("*.py")], n=1)
        hint = f"; did you mean {str(path.parent / near[0])!r}?" if near else f" (the current folder is {Path.cwd()})"
        raise InputError(f"{key}={function}: no such file: {path}{hint}")
    source = FromFile(path.resolve(), name, path.read_bytes())
    seen = _seen(source, f"{key}={function}")
    if not seen.exists:
        near = get_close_matches(name, seen.functions, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; it has {', '.join(seen.functions) or 'no function'}"
        lacks = f"no function {name!r} in {path}" if name else f"name the function: {path}:NAME"
        raise InputError(f"{key}={function}: {lacks}{hint}")
    return source, seen


@cache
def _seen(source: FromFile, where: str) -> Seen:
    pool = Pool([Pooled(str(source.path), Look(source))], workers=1, timeout=START_SECONDS)
    try:
        outcome = pool.results(pool.submit(0, [Item(("",), (0,), {}, "")]))[0]
    finally:
        pool.close()
    if outcome.status is Status.TIMEOUT:
        raise InputError(
            f"{where}: importing {source.path} has not come to an end within {START_SECONDS:g} s: what takes long, or never "
            "ends, belongs inside the function"
        )
    if outcome.status is Status.CRASHED:
        end = "\n".join((outcome.error or "").strip().splitlines()[-6:])
        raise InputError(f"{where}: importing {source.path} failed:\n{end}")
    return Seen(**outcome.values[0])


# ------------------------------------------------------------------------------ columns


def _with_columns(
    function: Callable[..., Any] | FromFile, signature: Callable[[], inspect.Signature], rows: Rows, where: str
) -> Call:
    """`function` with the columns that its parameters name. Raises InputError if one cannot be given."""
    try:
        parameters = list(signature().parameters.values())
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
    special = frozenset(p.name for p in named if p.name in SPECIAL)
    for name in sorted(special & set(rows.columns)):
        raise InputError(
            f"{where}: {name} is {SPECIAL[name]}, and cannot name a column too: rename that of {rows.name}"
        )
    named = [p for p in named if p.name not in special]
    required = [p.name for p in named if p.default is kinds.empty]
    require_columns({name: name for name in required}, rows, where)
    takes_all = any(p.kind is kinds.VAR_KEYWORD for p in others)
    if takes_all and first.kind is kinds.POSITIONAL_OR_KEYWORD and first.name in rows.columns:
        raise InputError(
            f"{where}: its first parameter {first.name!r}, which takes the completion, has the name of a column, which **kwargs would take too: rename it"
        )
    reads = {p.name: p.name for p in named if p.name in rows.columns}
    reads |= {column: column for column in rows.columns} if takes_all else {}
    optional = frozenset(p.name for p in named if p.default is not kinds.empty)
    return Call(function, reads, special=special, optional=optional, group=first.name == "completions")


def require_columns(needs: Mapping[str, str], rows: Rows, where: str) -> None:
    """Every column that is needed exists and is null in no row; raises InputError."""
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
