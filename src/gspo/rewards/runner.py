"""Reward functions run in worker processes that can be killed, so that no answer can hang or end a run.

In: functions (`Call`s) and the `Item`s to call them with. Out: an `Outcome` for each item, in order, whatever the function
does. `load.py` starts a `Pool`, `score.py` gives it work.

A worker takes one item at a time, or several where they have proved to be quick. The deadline is the parent's: a worker
that misses it is killed with all that it has started, and replaced. Nothing here waits without a bound.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import selectors
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import cloudpickle

from gspo.errors import InputError, RunError
from gspo.rewards.call import Call, FromFile, Item
from gspo.rewards.worker import HEADER
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

    values: tuple[float | None, ...]
    """A number for each of its completions; None where there is no verdict."""
    status: Status
    seconds: float
    """That the function took, where it came to an end; else until it was ended."""
    error: str | None = None
    """Traceback, or what is known of the end."""


@dataclass
class _Task:
    ticket: int
    function: int
    item: Item


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    requests: int
    replies: int
    life: int
    stderr: Any
    since: float
    """When the item at hand began, or when the worker was started."""
    ready: bool = False
    outgoing: memoryview = field(default_factory=lambda: memoryview(b""))
    incoming: bytes = b""
    tasks: dict[int, _Task] = field(default_factory=dict)
    """Not answered yet, by their place in what was sent; in order."""


class Pool:
    """Worker processes, started once for a run."""

    def __init__(
        self, calls: Sequence[tuple[str, Call]], *, workers: int, timeout: float, memory_gb: float | None
    ) -> None:
        """Start the workers, and wait until they have loaded their functions.

        Args:
            calls: name and function; their index is how they are called.
            timeout: seconds for one answer.
            memory_gb: address space of a worker, in units of 2^30 bytes; None: no limit.

        Raises:
            InputError: a function cannot be sent to another process, or cannot be loaded there.
        """
        self._names = [name for name, _ in calls]
        self._async = [call.asynchronous for _, call in calls]
        self._timeout = timeout
        self._memory = int((memory_gb or 0) * 2**30)
        self._setup = _frame((sys.path, timeout, [(name, _pickled(name, call)) for name, call in calls]))
        self._seconds: dict[int, float] = {}
        self._queue: deque[_Task] = deque()
        self._done: dict[int, Outcome] = {}
        self._tickets = 0
        self._failed_starts = 0
        self._ending: list[tuple[subprocess.Popen[bytes], float]] = []
        self._lock = threading.RLock()
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        # Workers end with their pipes, so what is left to do when nobody has called `close` is to close these.
        self._finalizer = weakref.finalize(self, _abandon, self._workers)
        try:
            for _ in range(workers):
                self._start()
            while not all(worker.ready for worker in self._workers):
                self._turn()
        except RunError as error:
            self.close()
            raise InputError(str(error)) from error
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Of the workers' first processes."""
        return [worker.process.pid for worker in self._workers]

    # -------------------------------------------------------------------------- work

    def submit(self, function: int, items: Sequence[Item]) -> list[int]:
        """Queue a call of the function for each item, and give back their tickets."""
        with self._lock:
            tickets = list(range(self._tickets, self._tickets + len(items)))
            self._tickets += len(items)
            self._queue.extend(_Task(t, function, item) for t, item in zip(tickets, items, strict=True))
            self._turn(0.0)
        return tickets

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
            for worker in list(self._workers):
                self._drop(worker)
            end = time.monotonic() + _END_SECONDS
            while self._ending and time.monotonic() < end:
                self._bury()
                time.sleep(0.002)
            self._queue.clear()
            self._selector.close()

    # -------------------------------------------------------------------------- one turn of the loop

    def _turn(self, wait: float = _TICK) -> None:
        """Hand out work, read what has come, end what is late."""
        self._hand_out()
        for key, events in self._selector.select(wait):
            worker: _Worker = key.data
            if worker in self._workers:
                if events & selectors.EVENT_WRITE:
                    self._send(worker)
                if events & selectors.EVENT_READ:
                    self._receive(worker)
        now = time.monotonic()
        for worker in list(self._workers):
            if now > self._deadline(worker):
                self._late(worker, now)
        self._bury()
        self._hand_out()

    def _hand_out(self) -> None:
        for worker in list(self._workers):
            if self._queue and worker.ready and not worker.tasks and worker in self._workers:
                self._give(worker)

    def _give(self, worker: _Worker) -> None:
        function = self._queue[0].function
        batch: list[_Task] = []
        # No worker gets so much that another has nothing left to do.
        share = -(-len(self._queue) // len(self._workers))
        while self._queue and self._queue[0].function == function and len(batch) < min(self._size(function), share):
            batch.append(self._queue.popleft())
        try:
            frame = _frame((function, [task.item for task in batch]))
        except Exception as error:
            for task in batch:
                self._finish(task, Status.CRASHED, 0.0, f"its columns cannot be sent to another process: {error}")
            return
        worker.tasks = dict(enumerate(batch))
        worker.since = time.monotonic()
        self._queue_bytes(worker, frame)

    def _size(self, function: int) -> int:
        if self._async[function]:
            return _TOGETHER
        seconds = self._seconds.get(function)
        return 1 if seconds is None else max(1, min(_MOST, int(BATCH_SECONDS / max(seconds, 1e-6))))

    def _deadline(self, worker: _Worker) -> float:
        if not worker.ready:
            return worker.since + START_SECONDS
        if not worker.tasks:
            return float("inf")
        tasks = list(worker.tasks.values())
        together = self._async[tasks[0].function]
        answers = max(len(task.item.completions) for task in tasks) if together else len(tasks[0].item.completions)
        return worker.since + self._timeout * answers + (_GRACE if together else 0.0)

    def _late(self, worker: _Worker, now: float) -> None:
        if not worker.ready:
            self._replace(worker)
            raise RunError(f"a reward worker was not ready within {START_SECONDS:g} s: {_tail(worker.stderr)}")
        tasks = list(worker.tasks.values())
        # Items of an async function run side by side: all of them have had their time.
        late = tasks if self._async[tasks[0].function] else tasks[:1]
        for task in late:
            self._finish(task, Status.TIMEOUT, now - worker.since, self._late_words(task))
        self._queue.extendleft(reversed(tasks[len(late) :]))
        worker.tasks = {}
        self._replace(worker)

    def _late_words(self, task: _Task) -> str:
        seconds = self._timeout * len(task.item.completions)
        return f"{self._names[task.function]}: no verdict within {seconds:g} s (judging.timeout)"

    def _finish(self, task: _Task, status: Status, seconds: float, error: str | None) -> None:
        self._done[task.ticket] = Outcome((None,) * len(task.item.completions), status, seconds, error)

    # -------------------------------------------------------------------------- what comes and goes

    def _queue_bytes(self, worker: _Worker, data: bytes) -> None:
        worker.outgoing = memoryview(bytes(worker.outgoing) + data)
        self._send(worker)

    def _send(self, worker: _Worker) -> None:
        try:
            while worker.outgoing:
                worker.outgoing = worker.outgoing[os.write(worker.requests, worker.outgoing) :]
        except BlockingIOError:
            self._watch(worker, writing=True)
            return
        except OSError:  # it has ended; what it replied is read first
            worker.outgoing = memoryview(b"")
        self._watch(worker, writing=False)

    def _watch(self, worker: _Worker, *, writing: bool) -> None:
        watched = worker.requests in self._selector.get_map()
        if writing and not watched:
            self._selector.register(worker.requests, selectors.EVENT_WRITE, worker)
        elif watched and not writing:
            self._selector.unregister(worker.requests)

    def _receive(self, worker: _Worker) -> None:
        ended = False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                data = os.read(worker.replies, 1 << 16)
                ended = not data
                worker.incoming += data
        *lines, worker.incoming = worker.incoming.split(b"\n")
        try:
            for line in lines:
                self._take(worker, json.loads(line))
        except (ValueError, TypeError, KeyError, AttributeError):  # a function has written into the pipe
            ended = True
        if ended:
            self._ended(worker)

    def _take(self, worker: _Worker, line: list[Any]) -> None:
        if line[0] == "ready":
            worker.ready, self._failed_starts = True, 0
            return
        if line[0] == "failed":
            raise RunError(f"reward function {line[1]}: it cannot be loaded in a worker process:\n{line[2]}")
        place, status, values, error, seconds, at = line
        task = worker.tasks.pop(place)
        worker.since = at
        if status == Status.TIMEOUT:
            error = self._late_words(task)
        count = len(task.item.completions)
        self._done[task.ticket] = Outcome(
            tuple(values) if values is not None else (None,) * count, Status(status), seconds, error
        )
        before = self._seconds.get(task.function, seconds)
        self._seconds[task.function] = max(seconds, 0.8 * before + 0.2 * seconds)

    def _ended(self, worker: _Worker) -> None:
        """The worker died, or spoke no sense: what it was at has crashed, the rest goes to another."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            worker.process.wait(_TICK if worker.tasks or not worker.ready else 0)
        code = worker.process.poll()
        how = "it closed or broke its pipe" if code is None else _ending(code)
        if not worker.ready:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                raise RunError(f"reward workers end while they start ({how}): {_tail(worker.stderr)}")
        tasks = list(worker.tasks.values())
        alike = bool(tasks) and self._async[tasks[0].function]
        for task in tasks if alike else tasks[:1]:
            words = f"{self._names[task.function]}: its process ended while it judged this answer: {how}"
            self._finish(task, Status.CRASHED, time.monotonic() - worker.since, words)
        self._queue.extendleft(reversed([] if alike else tasks[1:]))
        worker.tasks = {}
        self._replace(worker)

    # -------------------------------------------------------------------------- processes

    def _start(self) -> None:
        requests, sending = os.pipe()
        receiving, replies = os.pipe()
        life, held = os.pipe()
        theirs = (requests, replies, life)
        stderr = tempfile.TemporaryFile()
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        here = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        # -P: a json.py in the current folder is not ours.
        command = [sys.executable, "-P", "-m", "gspo.rewards.worker", *map(str, (*theirs, self._memory))]
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                pass_fds=theirs,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"a reward worker cannot be started: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (sending, receiving):
            os.set_blocking(descriptor, False)
        worker = _Worker(process, sending, receiving, held, stderr, time.monotonic())
        self._workers.append(worker)
        self._selector.register(receiving, selectors.EVENT_READ, worker)
        self._queue_bytes(worker, self._setup)

    def _replace(self, worker: _Worker) -> None:
        self._drop(worker)
        self._start()

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        self._watch(worker, writing=False)
        self._selector.unregister(worker.replies)
        _let_go(worker)
        self._ending.append((worker.process, time.monotonic() + _END_SECONDS / 2))

    def _bury(self) -> None:
        """Collect what was told to end; force what does not."""
        for process, until in list(self._ending):
            if process.poll() is not None:
                self._ending.remove((process, until))
            elif time.monotonic() > until:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, 9)


def _let_go(worker: _Worker) -> None:
    """Tell the warden, in two ways, to end its worker and all that came of it, and then itself."""
    if worker.process.poll() is None:
        worker.process.terminate()
    for descriptor in (worker.requests, worker.replies, worker.life):
        os.close(descriptor)
    worker.requests = worker.replies = worker.life = -1


def _abandon(workers: list[_Worker]) -> None:
    for worker in workers:
        if worker.life >= 0:
            _let_go(worker)


def _frame(value: Any) -> bytes:
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # rows given from Python may hold what only cloudpickle can take
        data = cloudpickle.dumps(value)
    return HEADER.pack(len(data)) + data


def _pickled(name: str, call: Call) -> bytes:
    try:
        return cloudpickle.dumps(call)  # type: ignore[no-any-return]
    except Exception as error:
        raise InputError(
            f"reward function {name}: it cannot be sent to a worker process ({type(error).__name__}: {error}): "
            "it holds what belongs to this process (an open file, a lock, a connection): make that inside the function, at its first call"
        ) from error


def _ending(code: int) -> str:
    if code < 0 or code > 128:
        return f"signal {abs(code) if code < 0 else code - 128}"
    return f"exit code {code}"


def _tail(file: Any) -> str:
    file.seek(0)
    return file.read()[-2000:].decode(errors="replace").strip() or "it said nothing"  # type: ignore[no-any-return]


def from_file(call: Call, function: FromFile) -> Call:
    """The same call, of a function that each worker loads from the file's bytes."""
    return replace(call, function=function)  # type: ignore[arg-type]
