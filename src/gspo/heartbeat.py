"""A sign of life: a phase that lasts is named on the console once a minute.

In: the phases of a run as they begin and end. Out: lines. `console` holds a `Heartbeat`; `job`, the stages and `build` say what
they are at. A run whose phases are shorter says nothing.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

SECONDS = 60.0
"""Between two signs of life."""


class Heartbeat:
    """One thread, started with the first phase; `close` ends it."""

    def __init__(self, say: Callable[[str], None], seconds: float = SECONDS) -> None:
        self._say, self._seconds = say, seconds
        self._at: tuple[str, float] | None = None
        """The phase at hand, and when it began."""
        self._over = threading.Event()
        self._thread: threading.Thread | None = None

    @contextmanager
    def at(self, phase: str) -> Iterator[None]:
        """While it lasts the run is at `phase`; a phase may lie in another."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()
        around, self._at = self._at, (phase, time.monotonic())
        try:
            yield
        finally:
            self._at = around

    def close(self) -> None:
        self._over.set()

    def _beat(self) -> None:
        said = 0.0
        while not self._over.wait(min(1.0, self._seconds / 4)):
            at, now = self._at, time.monotonic()
            if at is not None and now - max(at[1], said) >= self._seconds:
                said = now
                self._say(f"    still at it after {now - at[1]:.0f} s: {at[0]}")
