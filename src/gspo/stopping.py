"""Signals that end a run in good order: what is at hand is finished and saved.

In: SIGINT, SIGTERM, and SIGHUP of a terminal that was closed. Out: `Stop.by`, which `job` and the stages look at between two steps.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
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
        """SIGINT, SIGTERM and SIGHUP set `by`; a second SIGINT or SIGTERM ends the program at once."""
        before: dict[signal.Signals, Any] = {}
        terminals = [output for output in (1, 2) if os.isatty(output)]

        def stop(number: int, frame: FrameType | None) -> None:
            self.by = signal.Signals(number)
            for each, at_once in _AT_ONCE.items():
                # A shell's background job ignores SIGINT: restored, a second one would do nothing.
                signal.signal(each, at_once if before[each] in (signal.SIG_IGN, None) else before[each])
            again = "SIGTERM" if self.by is signal.SIGHUP else "Again"
            say(f"{self.by.name}: finishing this step, then saving. {again} to stop at once.")

        def hang_up(number: int, frame: FrameType | None) -> None:
            _silence(terminals)
            if self.by is None:  # a shell that ends sends it, and the kernel once more: that is no impatience
                stop(number, frame)

        if threading.current_thread() is threading.main_thread():  # elsewhere the caller owns the signals
            before |= {each: signal.signal(each, stop) for each in _AT_ONCE}
            # Ignored as under nohup: the run is to outlive its terminal.
            if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
                before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
            _silence(terminals)  # of a run that has outlived its own, the last words are still to come


def _silence(outputs: Sequence[int]) -> None:
    """Let go nowhere what is written to terminals that have gone, where it would fail."""
    for output in outputs:
        if not os.isatty(output):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, output)
            os.close(nowhere)
