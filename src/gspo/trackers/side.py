"""Trackers beside a run: each in a process of its own, so that none can stop, slow or change it.

In: names, and the folder whose journal they read. Out: at most a warning each. `job` holds `Trackers` and closes it when the
run is over. The run itself does nothing for them: they read what the journal has on the disk.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

START_SECONDS = 60.0
"""Time that a tracker has from its start until it takes the first step, at the end of a run that was shorter."""
STEP_SECONDS = 1.0
"""Time at the end of a run without a sign of life: it is on one step for as long, or does not begin with the next."""
_END_SECONDS = 3.0
"""For the kernel to end what was told to end."""


class Trackers:
    """The trackers of a run."""

    def __init__(self, names: Sequence[str], folder: Path, *, after: int, say: Callable[[str], None]) -> None:
        """Start them, for the steps past `after`. One that cannot be started is said, and the run goes on."""
        self._say = say
        self._fed: list[_Fed] = []
        for name in names:
            try:
                self._fed.append(_Fed(name, folder, after, say))
            except OSError as error:
                say(f"warning: tracker {name} could not be started: {error}")

    def close(self) -> None:
        """Tell them that the run is over, wait for as long as each has, and end those that need more."""
        closed = time.monotonic()
        for each in self._fed:
            each.tell_end()
        waited = list(self._fed)
        while waited := [each for each in waited if each.popen.poll() is None]:
            for each in [each for each in waited if time.monotonic() > each.deadline(closed)]:
                waited.remove(each)
                self._say(
                    f"warning: tracker {each.name} was still at {each.at} {time.monotonic() - each.since:.0f} s after it began, and was ended. "
                    f"journal.jsonl has every step; what it printed is in {each.log}"
                )
                each.end()
            time.sleep(0.02)
        for each in self._fed:
            each.end()
        self._fed.clear()


class _Fed:
    """One started process, and the side thread that listens to it."""

    def __init__(self, name: str, folder: Path, after: int, say: Callable[[str], None]) -> None:
        self.name, self.at, self.since, self.grace = name, "start", time.monotonic(), 0.0
        self._say = say
        store = folder / "trackers"
        store.mkdir(exist_ok=True)
        self.log = store / f"{name.replace('/', '_').replace(':', '-')}.log"
        self._events, events = os.pipe()
        end, self._end = os.pipe()
        life, self._life = os.pipe()
        theirs = (events, end, life)
        here = str(Path(__file__).parents[2])
        path = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        words = [sys.executable, "-P", "-m", "gspo.trackers.feed", name, str(folder), str(after), *map(str, theirs)]
        try:
            with self.log.open("ab") as log:
                self.popen = subprocess.Popen(
                    words,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    pass_fds=theirs,
                    env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
                    start_new_session=True,
                )
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        self._listener = threading.Thread(target=self._listen, name=f"tracker {name}", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        with open(self._events, "rb") as events:
            for line in events:
                event: dict[str, Any] = json.loads(line)
                if "failed" in event:
                    self._say(
                        f"warning: tracker {self.name}: {event['failed']}. The run goes on; its traceback is in {self.log}"
                    )
                else:
                    self.grace = event.get("grace", 0.0)
                    self.at, self.since = event["at"], time.monotonic()

    def tell_end(self) -> None:
        self._end = _closed(self._end)

    def deadline(self, closed: float) -> float:
        """When it has had its time, given that it was told at `closed` that the run is over."""
        if self.at == "start":
            return self.since + START_SECONDS
        if self.grace:
            return self.since + self.grace
        return max(closed, self.since) + STEP_SECONDS

    def end(self) -> None:
        """End it, and all that came of it; nothing if it has ended."""
        self._life = _closed(self._life)  # which its warden sees
        self.tell_end()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(_END_SECONDS)
        self._listener.join(_END_SECONDS)  # what it said last is not lost


def _closed(descriptor: int) -> int:
    if descriptor >= 0:
        os.close(descriptor)
    return -1
