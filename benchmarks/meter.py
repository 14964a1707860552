"""The clock of our workers, and the trace of a row that misses its bar.

Called by `ours.py` and `logprob_memory.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from work import Work

_ORDER = {"time": "self_cpu_time_total", "memory": "self_cpu_memory_usage"}


def now() -> float:
    """Seconds, when all that was asked of the device is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


class Clock:
    """Seconds of the phases of a step; they add up to the whole of it."""

    def __init__(self) -> None:
        self.phases: dict[str, float] = {}
        self._mark = now()

    def lap(self, name: str) -> None:
        """What has passed since the last lap belongs to this phase."""
        mark = now()
        self.phases[name] = self.phases.get(name, 0.0) + mark - self._mark
        self._mark = mark

    @contextmanager
    def around(self, owner: Any, *, rest: str, **names: str) -> Iterator[None]:
        """Inside, calls of these methods of `owner` are phases of their own, and `rest` is what is between them."""

        def timed(method: str, name: str) -> Callable[..., Any]:
            call = getattr(owner, method)

            def wrapped(*args: Any, **keys: Any) -> Any:
                self.lap(rest)
                try:
                    return call(*args, **keys)
                finally:
                    self.lap(name)

            return wrapped

        for method, name in names.items():
            setattr(owner, method, timed(method, name))
        try:
            yield
        finally:
            for method in names:
                delattr(owner, method)
            self.lap(rest)


@contextmanager
def traced(work: Work) -> Iterator[Callable[[], str | None]]:
    """Yields what gives, afterwards, the table of the costliest operations; None unless it was asked for."""
    if not work.profile:
        yield lambda: None
        return
    with torch.profiler.profile(profile_memory=work.profile == "memory") as profiler:
        yield lambda: profiler.key_averages().table(
            sort_by=_ORDER[work.profile], row_limit=25, max_name_column_width=45
        )
