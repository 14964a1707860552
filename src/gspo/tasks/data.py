"""Where prompts come from: a file, a hub data set, a built-in task, or rows given from Python.

In: `config.Data` and `config.HeldOut`. Out: checked `Rows`, with every column kept. `render.py` shows them to the
model, `rewards/` reads their columns; everything here is checked before a model is loaded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gspo.config import Data, HeldOut
from gspo.errors import InputError
from gspo.hub import out_of_reach
from gspo.tasks import builtin
from gspo.tasks.task import Side, Task

Row = dict[str, Any]
GIVEN = "rows given from Python"
Check = Callable[["Rows"], "Rows"]
"""What rows have to be before they are used: they, or what is made of them. Raises InputError with the rows at fault."""


@dataclass(frozen=True)
class Rows:
    """Prompts with the columns that their rewards read, before any rendering."""

    name: str
    """Where they come from, for messages."""
    rows: tuple[Row, ...]
    """Row i of the source is `rows[i]`: rows are counted from 0. Each row has every column; None where the source had none."""
    columns: tuple[str, ...]
    """In the order of their first appearance."""
    lines: tuple[int, ...] = ()
    """JSONL only: the line of each row, counted from 1."""
    notes: tuple[str, ...] = ()
    """What the user should be told once."""

    def __len__(self) -> int:
        return len(self.rows)

    def place(self, index: int) -> str:
        """`row 7`, and for JSONL `row 7 (line 9)`."""
        return f"row {index} (line {self.lines[index]})" if self.lines else f"row {index}"

    def places(self, indices: Sequence[int]) -> str:
        """The first ten places, and how many more there are."""
        shown = ", ".join(self.place(i) for i in indices[:10])
        return shown + (f" and {len(indices) - 10} more" if len(indices) > 10 else "")


def read_rows(data: Data, *, rows: Iterable[Mapping[str, Any]] | None = None, check: Check | None = None) -> Rows:
    """The rows of `data.source`, or `rows` if they are given; the first `data.limit` of them.

    `check`, if given, stands in the place of `checked_prompts`.

    Raises:
        InputError: no such file, data set or task; a malformed line; no rows; no prompt column; a prompt that is
            null, empty, or neither text nor chat messages ending before the answer.
    """
    if rows is not None:
        found = _collect(GIVEN, islice(rows, data.limit))
    elif (task := builtin.find(data.source)) is not None:
        found = _from_task(data.source, task, "train", data.limit)
    elif (reader := _READERS.get(Path(data.source).suffix)) is not None:
        found = reader(_existing(data.source), data.limit)
    else:
        found = _from_hub(data)
    return (check or checked_prompts(data))(found)


def held_out_rows(
    data: Data, evaluation: HeldOut, *, train: Rows | None = None, check: Check | None = None
) -> Rows | None:
    """The rows to evaluate on: those of `eval.source`, else the held-out rows of the task, else None.

    A task named by `eval.source` gives its held-out rows. `train`, the rows trained on, need only be passed if they
    were given from Python: `data.source` is then not their source.

    Raises:
        InputError: as `read_rows`.
    """
    source = evaluation.source or (None if train is not None and train.name == GIVEN else data.source)
    task = builtin.find(source) if source is not None else None
    if source is None or (evaluation.source is None and task is None):
        return None
    if task is not None:
        return (check or checked_prompts(data))(_from_task(source, task, "held_out", evaluation.limit))
    theirs = data.model_copy(update={"source": source, "split": evaluation.split, "limit": evaluation.limit})
    return read_rows(theirs, check=check)


def overlap(train: Rows, held_out: Rows, data: Data) -> str | None:
    """A warning with the number of evaluation prompts that training sees too; None if there are none."""
    seen = {_text(row[data.prompt]) for row in train.rows}
    both = [i for i, row in enumerate(held_out.rows) if _text(row[data.prompt]) in seen]
    if not both:
        return None
    return (
        f"{len(both)} of {len(held_out)} evaluation prompts ({held_out.name}: {held_out.places(both)}) "
        f"are also in the training data ({train.name}): eval/reward will flatter the model"
    )


def repeated(rows: Rows, column: str) -> str | None:
    """How many prompts stand in several rows, and whether such rows agree in all other columns; None if there are none.

    They are not merged: what stands twice is drawn twice an epoch, and each row is judged by its own columns.
    """
    first: dict[str, int] = {}
    again = [i for i, row in enumerate(rows.rows) if first.setdefault(_text(row[column]), i) != i]
    if not again:
        return None
    differ = [i for i in again if rows.rows[i] != rows.rows[first[_text(rows.rows[i][column])]]]
    said = (
        f"{rows.name}: {len(again)} of {len(rows)} prompts repeat an earlier one ({rows.places(again)}); "
        "each row stays, and is drawn once an epoch"
    )
    if not differ:
        return said
    i = differ[0]
    return f"{said}. {len(differ)} of them differ in other columns, as {rows.place(i)} does from {rows.place(first[_text(rows.rows[i][column])])}"


def _text(prompt: Any) -> str:
    return prompt if isinstance(prompt, str) else json.dumps(prompt, sort_keys=True, default=str)


# ------------------------------------------------------------------------------ sources


def _collect(name: str, found: Iterable[Any], **more: Any) -> Rows:
    listed = list(found)
    for i, row in enumerate(listed):
        if not isinstance(row, Mapping):
            raise InputError(f"{name}: row {i}: expected a mapping of columns, found {type(row).__name__}")
    columns = tuple(dict.fromkeys(column for row in listed for column in row))
    return Rows(name, tuple({column: row.get(column) for column in columns} for row in listed), columns, **more)


def _from_task(source: str, task: Task, side: Side, limit: int | None) -> Rows:
    rows, notes = task.rows(side, limit=limit)
    return _collect(source if side == "train" else f"{source}, held out", rows, notes=notes)


def _existing(source: str) -> Path:
    """The file, or an InputError with the nearest name in its folder."""
    path = Path(source)
    if path.is_file():
        return path
    raise InputError(f"data: {source}: {_no_file(path)}")


def _no_file(path: Path) -> str:
    """Why `path` is no file."""
    if path.is_dir():
        return "is a folder: name a file in it"
    return "is no file with rows in it" if path.exists() else f"no such file.{_near_file(path)}"


def _near_file(path: Path) -> str:
    if not path.parent.is_dir():
        return f" There is no folder {path.parent}."
    near = get_close_matches(path.name, [entry.name for entry in path.parent.iterdir()], n=1)
    return f" Did you mean {str(path.parent / near[0])!r}?" if near else f" The current folder is {Path.cwd()}."


def _from_jsonl(path: Path, limit: int | None) -> Rows:
    """Line by line with `json`, and not with `datasets`: its reader turns answers such as "2024-01-02" into dates and
    7 into 7.0 beside a 7.5, and does not tell which line is malformed.
    """
    rows: list[Row] = []
    lines: list[int] = []
    with path.open("rb") as file:
        for number, raw in enumerate(file, start=1):
            if not raw.strip():
                continue
            where = f"{path}: line {number} (row {len(rows)})"
            try:
                row = json.loads(raw.decode("utf-8-sig"), object_pairs_hook=_once)
            except InputError as error:
                raise InputError(f"{where}: {error}") from error
            except (ValueError, RecursionError) as error:
                raise InputError(
                    f'{where}: not valid JSON: {error}. Each line is one object, as in {{"prompt": ...}}'
                ) from error
            if not isinstance(row, dict):
                raise InputError(f"{where}: expected one JSON object on each line, found {type(row).__name__}")
            rows.append(row)
            lines.append(number)
            if len(rows) == limit:
                break
    return _collect(str(path), rows, lines=tuple(lines))


def _once(pairs: list[tuple[str, Any]]) -> Row:
    """A JSON object; that a key stands twice is not for us to settle. Raises InputError."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InputError(f"the key {twice!r} stands in it twice: leave one")
    return found


def _from_parquet(path: Path, limit: int | None) -> Rows:
    import datasets
    from pyarrow.parquet import read_metadata

    # A cache of its own that is gone afterwards, so that a changed file can never give its old rows.
    with TemporaryDirectory() as cache, _quiet():
        try:
            if not read_metadata(path).num_rows:  # of which `datasets` says that its batches are too small
                return _collect(str(path), [])
            table = datasets.Dataset.from_parquet(str(path), cache_dir=cache, keep_in_memory=True)
        except (datasets.exceptions.DatasetsError, ValueError, OSError, NotImplementedError) as error:
            raise InputError(f"{path}: not a readable Parquet file: {error.__cause__ or error}") from error
        return _collect(str(path), _listed(table, limit))


def _from_hub(data: Data) -> Rows:
    """`owner/name`, or `owner/name:configuration` where a data set has several."""
    source, _, configuration = data.source.partition(":")
    path = Path(data.source)
    if not data.source.strip():
        raise InputError("data: no source is named: give a file, a task (`gspo tasks` lists them) or a hub data set")
    builtin.refuse_near(data.source)
    if path.is_file():
        raise InputError(f"data: {path}: cannot read files of this kind; the name must end in {', '.join(_READERS)}")
    if path.is_dir() or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", source):
        raise InputError(f"data: {data.source}: {_no_file(path)}")
    silent = out_of_reach()
    import datasets

    try:
        with _quiet():
            table = datasets.load_dataset(source, configuration or None, split=data.split)
    except (OSError, ValueError, RuntimeError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"data.source={data.source}: tried the built-in tasks ({', '.join(builtin.TASKS)}), a file of that name, and the "
            f"hub data set {source!r} with split {data.split!r}, where: {silent or error}. A configuration of a data set is "
            f"written {source}:CONFIGURATION.{_near_file(path)}"
        ) from error
    return _collect(f"{data.source} ({data.split})", _listed(table, data.limit))


def _listed(table: Any, limit: int | None) -> list[Row]:
    listed: list[Row] = table.select(range(min(limit or len(table), len(table)))).to_list()
    return listed


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the progress bars of `datasets`, which would come in the midst of our own lines."""
    import datasets

    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


_READERS: dict[str, Callable[[Path, int | None], Rows]] = {
    ".jsonl": _from_jsonl,
    ".ndjson": _from_jsonl,
    ".json": _from_jsonl,
    ".parquet": _from_parquet,
}


# ------------------------------------------------------------------------------ checks


def checked_prompts(data: Data) -> Check:
    """Every row has a prompt: text, or messages that end before the answer."""
    return lambda found: checked_column(found, data.prompt, "data.prompt", _fault)


def checked_column(found: Rows, column: str, key: str, fault: Callable[[Any], str | None]) -> Rows:
    """`found`, if it has the column that `key` names and `fault` finds none in it; else InputError with the rows."""
    if not found.rows:
        raise InputError(f"{found.name}: no rows")
    if column not in found.columns:
        near = get_close_matches(column, found.columns, n=1)
        hint = f"; did you mean {key}={near[0]}?" if near else f"; set {key}"
        raise InputError(
            f"{found.name}: no column {column!r} ({key}) among its columns {', '.join(found.columns)}{hint}"
        )
    faults: dict[str, list[int]] = {}
    for i, row in enumerate(found.rows):
        if said := fault(row[column]):
            faults.setdefault(said, []).append(i)
    if faults:
        each = "; ".join(f"{found.places(where)}: {said}" for said, where in faults.items())
        raise InputError(f"{found.name}: column {column!r}: {each}. Rows are counted from 0")
    return found


def unwritable(text: str) -> str | None:
    """Half of a surrogate pair can stand in JSON, and in no file and no tokenizer."""
    return "it has a character that is no Unicode text" if any("\ud800" <= c <= "\udfff" for c in text) else None


def message_fault(message: Any) -> str | None:
    """What is wrong with a chat message, or None."""
    if not isinstance(message, Mapping) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
        return 'each message is {"role": text, "content": text}'
    return unwritable(message["content"])


def _fault(prompt: Any) -> str | None:
    """What is wrong with a prompt, or None."""
    if prompt is None:
        return "the prompt is null"
    if isinstance(prompt, str):
        return unwritable(prompt) or (None if prompt.strip() else "the prompt is empty")
    if not isinstance(prompt, list):
        return f"a prompt is text or a list of messages, not {type(prompt).__name__}"
    if not prompt:
        return "the prompt is an empty list of messages"
    if fault := next(filter(None, map(message_fault, prompt)), None):
        return fault
    if prompt[-1]["role"] == "assistant":
        return "the messages end with the assistant's answer, which the model is to write: leave it out"
    return None if any(message["content"].strip() for message in prompt) else "the prompt is empty"
