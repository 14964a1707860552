"""The process of one tracker: `python -m gspo.trackers.feed NAME RUN AFTER EVENTS END LIFE`.

In: the journal of a run, as it grows. Out: its numbers to a tracker, and on the pipe EVENTS a line of JSON for whatever begins or
fails. `side` starts it and closes END when the run is over. What the tracker prints goes to trackers/NAME.log.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gspo import written
from gspo.trackers.adapters import About, Tracker, start
from gspo.warden import guard

_LOOK_SECONDS = 0.3
"""Between two looks at the journal."""


def feed(name: str, folder: Path, after: int, events: int, end: int) -> None:
    """Give each step past `after` to the tracker, until END is closed. What it raises is told once, and it goes on."""

    def tell(**event: Any) -> None:
        os.write(events, json.dumps(event).encode() + b"\n")

    settings = written.read((folder / "run.yaml").read_text(encoding="utf-8"))
    tell(at="start")
    try:
        tracker = start(name, About(folder.resolve().name, folder, settings, after))
    except BaseException as error:
        tell(failed=f"it could not be started: {_words(error)}")
        return
    told = False
    for line in _lines(folder / "journal.jsonl", end):
        if line["step"] <= after:
            continue
        tell(at=f"step {line['step']}")
        try:
            tracker.log(line["step"], numbers(line))
        except BaseException as error:
            if not told:
                tell(failed=f"step {line['step']} was not taken: {_words(error)}")
            told = True
    _finish(tracker, tell)


def _finish(tracker: Tracker, tell: Any) -> None:
    tell(at="its end", grace=float(getattr(tracker, "grace", 1.0)))
    try:
        tracker.finish()
    except BaseException as error:
        tell(failed=f"it could not be ended in good order: {_words(error)}")


def _lines(path: Path, end: int) -> Iterator[dict[str, Any]]:
    """The lines of the journal as they come; the last ones after END was closed."""
    read, ended = 0, False
    while True:
        if path.exists():
            with path.open("rb") as file:
                file.seek(read)
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            read += len(whole)
            for line in whole.splitlines():
                yield json.loads(line)
        if ended:
            return
        ended = bool(select.select([end], [], [], _LOOK_SECONDS)[0])  # nobody writes to it: it was closed


def numbers(line: dict[str, Any]) -> dict[str, float]:
    """The finite numbers of a line of the journal; those of a list, layer by layer, under its name and their place."""
    found: dict[str, float] = {}
    for key, value in line.items():
        parts = {f"{key}/{i}": each for i, each in enumerate(value)} if isinstance(value, list) else {key: value}
        for name, each in parts.items():
            if isinstance(each, int | float) and math.isfinite(each) and name not in ("format", "step"):
                found[name] = float(each)
    return found


def _words(error: BaseException) -> str:
    traceback.print_exception(error)  # into its log
    return "".join(traceback.format_exception_only(error)).strip()[-500:]


def _main(name: str, folder: str, after: str, events: str, end: str, life: str) -> int:
    descriptors = int(events), int(end)
    return guard(lambda: feed(name, Path(folder), int(after), *descriptors), int(life), theirs=descriptors)


if __name__ == "__main__":
    sys.exit(_main(*sys.argv[1:]))
