"""Signals that end a run in good order: what is at hand is finished and saved.

In: SIGINT, SIGTERM. Out: `Stop.by`, which `job` and the stages look at between two steps.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

_AT_ONCE: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


@dataclass
class Stop:
    """Whether a run was asked to end."""

    by: signal.Signals | None = None

    @contextmanager
    def on_signals(self, say: Callable[[str], None]) -> Iterator[None]:
        """SIGINT and SIGTERM set `by`; a second one ends the program at once."""
        before: dict[signal.Signals, Any] = {}

        def stop(number: int, frame: FrameType | None) -> None:
            self.by = signal.Signals(number)
            for each, handler in before.items():
                # A shell's background job ignores SIGINT: restored, a second one would do nothing.
                signal.signal(each, _AT_ONCE[each] if handler in (signal.SIG_IGN, None) else handler)
            say(f"{self.by.name}: finishing this step, then saving. Again to stop at once.")

        if threading.current_thread() is threading.main_thread():  # elsewhere the caller owns the signals
            before |= {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
