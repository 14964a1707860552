"""Reward functions run in worker processes that can be killed, so that no answer can hang or end a run.

In: functions (`Pooled`) and the `Item`s to call them with. Out: an `Outcome` for each item, in order, whatever the function
does. `load.py` starts a `Pool`, `score.py` gives it work.

A worker takes one item at a time, or several where they have proved to be quick. The deadline is the parent's: a worker
that misses it is killed with all that it has started, and replaced. Nothing here waits without a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from gspo.errors import InputError, RunError
from gspo.rewards.call import Work
from gspo.rewards.process import Pooled, Process, frame, setup
from gspo.types import Status

START_SECONDS = 120.0
"""Within this, a worker has to have imported what its functions need."""
BATCH_SECONDS = 0.02
"""A worker is sent about as much as it can judge in this time."""
_MOST = 512
_TOGETHER = 64
"""Items of an async function that a worker awaits at once."""
_GRACE = 1.0
"""Async functions are timed out inside the worker; it is killed only if it is this much later still."""
_TICK = 0.05
_END_SECONDS = 5.0
_FAILED_STARTS = 3


@dataclass(frozen=True)
class Outcome:
    """What became of one item."""

    values: tuple[Any, ...]
    """A number for each of its completions, None where there is no verdict; of an environment, what it says."""
    status: Status
    seconds: float
    """That the function took, where it came to an end; else until it was ended."""
    error: str | None = None
    """Traceback, or what is known of the end."""


@dataclass(frozen=True)
class _Task:
    ticket: int
    function: int
    item: Work

    @property
    def answers(self) -> int:
        return len(self.item.completions)

    @property
    def session(self) -> int | None:
        """Items of one session are done in order by one worker, where what they began is kept."""
        return self.item.session


class Pool:
    """Worker processes, started once for a run."""

    def __init__(
        self,
        functions: Sequence[Pooled],
        *,
        workers: int,
        timeout: float,
        memory_gb: float | None = None,
        limit: str = "judging.timeout",
    ) -> None:
        """Start the workers, and wait until they have loaded their functions.

        Args:
            functions: their place in the sequence is what `submit` calls them by.
            timeout: seconds for one answer.
            memory_gb: address space of a worker, in units of 2^30 bytes; None: no limit.
            limit: key of `timeout`, for messages.

        Raises:
            InputError: a function cannot be sent to another process, or cannot be loaded there.
        """
        self._names = [function.name for function in functions]
        self._async = [function.call.asynchronous for function in functions]
        self._timeout, self._limit = timeout, limit
        self._memory = int((memory_gb or 0) * 2**30)
        self._setup = setup(functions, timeout)
        self._seconds: dict[int, float] = {}
        self._queue: deque[_Task] = deque()
        self._homes: dict[int, Process] = {}
        """The worker of each session."""
        self._lines: dict[Process, deque[_Task]] = {}
        """What waits for one worker alone."""
        self._at: dict[Process, dict[int, _Task]] = {}
        """What each worker has been sent and has not answered, by its place in the frame; in order."""
        self._done: dict[int, Outcome] = {}
        self._tickets = 0
        self._failed_starts = 0
        self._ending: list[tuple[subprocess.Popen[bytes], float]] = []
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        # Without `close`, workers end when their pipes do.
        self._finalizer = weakref.finalize(self, _let_all_go, self._at)
        try:
            for _ in range(workers):
                self._start()
            while not all(worker.ready for worker in self._at):
                self._turn()
        except RunError as error:
            self.close()
            raise InputError(str(error)) from error
        except BaseException:
            self.close()
            raise

    # -------------------------------------------------------------------------- work

    def submit(self, function: int, items: Sequence[Work]) -> list[int]:
        """Queue a call of the function for each item, and give back their tickets."""
        with self._lock:
            tickets = list(range(self._tickets, self._tickets + len(items)))
            self._tickets += len(items)
            self._line_up(_Task(t, function, item) for t, item in zip(tickets, items, strict=True))
            self._turn(0.0)
        return tickets

    def leave(self, session: int) -> None:
        """The session is over: its worker is no longer kept for it."""
        with self._lock:
            self._homes.pop(session, None)

    def done(self, tickets: Iterable[int], wait: bool) -> dict[int, Outcome]:
        """Those of the tickets that have an outcome, each once; with `wait`, at least one if there are any.

        Raises:
            RunError: workers cannot be started any more.
        """
        while True:
            with self._lock:
                self._turn(_TICK if wait else 0.0)
                found = {ticket: self._done.pop(ticket) for ticket in tickets if ticket in self._done}
            if found or not wait or not tickets:
                return found

    def results(self, tickets: Sequence[int]) -> list[Outcome]:
        """The outcomes of the tickets, in their order; each ticket once. Waits for at most the time limit of each call.

        Raises:
            RunError: workers cannot be started any more.
        """
        while True:
            with self._lock:
                if all(ticket in self._done for ticket in tickets):
                    return [self._done.pop(ticket) for ticket in tickets]
                self._turn()

    def close(self) -> None:
        """End every process that the pool or its functions have started."""
        with self._lock:
            for worker in list(self._at):
                self._drop(worker)
            end = time.monotonic() + _END_SECONDS
            while self._ending and time.monotonic() < end:
                self._bury()
                time.sleep(0.002)
            self._queue.clear()
            self._lines.clear()
            self._selector.close()

    # -------------------------------------------------------------------------- one turn

    def _turn(self, wait: float = _TICK) -> None:
        """Hand out work, read what has come, end what is late."""
        self._hand_out()
        for key, events in self._selector.select(wait):
            if events & selectors.EVENT_WRITE and key.data in self._at:
                key.data.flush()
            if events & selectors.EVENT_READ and key.data in self._at:
                self._receive(key.data)
        now = time.monotonic()
        for worker in list(self._at):
            if now > self._deadline(worker):
                self._late(worker, now)
        self._bury()
        self._hand_out()

    def _hand_out(self) -> None:
        for worker in list(self._at):
            if worker.ready and not self._at[worker] and (queue := self._lines[worker] or self._queue):
                self._give(worker, queue)

    def _line_up(self, tasks: Iterable[_Task]) -> None:
        for task in tasks:
            if task.session is None:
                self._queue.append(task)
                continue
            home = self._homes.get(task.session)
            if home is None or home not in self._at:
                taken = Counter(self._homes.values())
                home = self._homes[task.session] = min(self._at, key=lambda worker: taken[worker])
            self._lines[home].append(task)

    def _give(self, worker: Process, queue: deque[_Task]) -> None:
        function = queue[0].function
        # No worker gets so much that another has nothing left to do.
        most = min(self._size(function), len(queue) if queue is not self._queue else -(-len(queue) // len(self._at)))
        batch: list[_Task] = []
        while queue and queue[0].function == function and len(batch) < most:
            batch.append(queue.popleft())
        try:
            data = frame((function, [task.item for task in batch]))
        except Exception as error:
            for task in batch:
                self._fail(task, Status.CRASHED, 0.0, f"its columns cannot be sent to another process: {error}")
            return
        self._at[worker] = dict(enumerate(batch))
        worker.since = time.monotonic()
        worker.send(data)

    def _size(self, function: int) -> int:
        if self._async[function]:
            return _TOGETHER
        seconds = self._seconds.get(function)
        return 1 if seconds is None else max(1, min(_MOST, int(BATCH_SECONDS / max(seconds, 1e-6))))

    def _side_by_side(self, tasks: Sequence[_Task]) -> bool:
        return bool(tasks) and self._async[tasks[0].function]

    def _deadline(self, worker: Process) -> float:
        tasks = list(self._at[worker].values())
        if not worker.ready:
            return worker.since + START_SECONDS
        if not tasks:
            return float("inf")
        if self._side_by_side(tasks):
            return worker.since + self._timeout * max(task.answers for task in tasks) + _GRACE
        return worker.since + self._timeout * tasks[0].answers

    def _late(self, worker: Process, now: float) -> None:
        if not worker.ready:
            raise RunError(f"a reward worker was not ready within {START_SECONDS:g} s: {worker.what_it_said()}")
        for task in self._give_up(worker):
            self._fail(task, Status.TIMEOUT, now - worker.since, self._late_words(task))

    def _give_up(self, worker: Process) -> list[_Task]:
        """Replace a worker. Returns what it was at; what it had not begun goes to another."""
        tasks = list(self._at[worker].values())
        begun = len(tasks) if self._side_by_side(tasks) else 1
        waiting = [*tasks[begun:], *self._lines[worker]]
        self._queue.extendleft(reversed([task for task in waiting if task.session is None]))
        self._drop(worker)
        self._start()
        self._line_up(task for task in waiting if task.session is not None)
        return tasks[:begun]

    def _late_words(self, task: _Task) -> str:
        return f"{self._names[task.function]}: no verdict within {self._timeout * task.answers:g} s ({self._limit})"

    def _fail(self, task: _Task, status: Status, seconds: float, error: str) -> None:
        self._done[task.ticket] = Outcome((None,) * task.answers, status, seconds, error)

    # -------------------------------------------------------------------------- replies

    def _receive(self, worker: Process) -> None:
        lines, ended = worker.receive()
        try:
            for line in lines:
                self._take(worker, json.loads(line))
        except (ValueError, TypeError, KeyError, IndexError):  # a function has written into the pipe
            ended = True
        if ended:
            self._ended(worker)

    def _take(self, worker: Process, line: list[Any]) -> None:
        if line[0] == "ready":
            worker.ready, self._failed_starts = True, 0
            return
        if line[0] == "failed":
            raise RunError(f"reward function {line[1]}: it cannot be loaded in a worker process:\n{line[2]}")
        place, status, values, error, seconds, at = line
        task = self._at[worker].pop(place)
        worker.since = at  # the worker's clock, which is this process's: the next item began then
        if status == Status.TIMEOUT:
            error = self._late_words(task)
        self._done[task.ticket] = Outcome(
            tuple(values) if values is not None else (None,) * task.answers, Status(status), seconds, error
        )
        before = self._seconds.get(task.function, seconds)
        self._seconds[task.function] = max(seconds, 0.8 * before + 0.2 * seconds)

    def _ended(self, worker: Process) -> None:
        """The worker died, or spoke no sense: what it was at has crashed."""
        how = worker.how_it_ended()
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                raise RunError(f"reward workers end while they start ({how}): {worker.what_it_said()}")
        for task in self._give_up(worker):
            words = f"{self._names[task.function]}: its process ended while it judged this answer: {how}"
            self._fail(task, Status.CRASHED, time.monotonic() - worker.since, words)

    # -------------------------------------------------------------------------- processes

    def _start(self) -> None:
        worker = Process(self._selector, self._memory)
        self._at[worker], self._lines[worker] = {}, deque()
        worker.send(self._setup)

    def _drop(self, worker: Process) -> None:
        del self._at[worker], self._lines[worker]
        worker.let_go()
        self._ending.append((worker.popen, time.monotonic() + _END_SECONDS / 2))

    def _bury(self) -> None:
        """Collect what was told to end; force what does not."""
        for process, until in list(self._ending):
            if process.poll() is not None:
                self._ending.remove((process, until))
            elif time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, signal.SIGKILL)


def _let_all_go(at: dict[Process, Any]) -> None:
    for worker in at:
        worker.let_go()
