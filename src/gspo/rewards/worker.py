"""The process in which reward functions run: `python -m gspo.rewards.worker REQUESTS REPLIES LIFE MEMORY`.

In: the numbers of three pipes and a limit of memory. Out: one line of JSON for each answer, as soon as it is judged.
`runner.py` starts it. JSON, since a reply comes from where other people's code has run and must not be unpickled.

It is two processes. The first, the *warden*, runs no function: it adopts whatever the second and its children leave
behind, and ends them all when it is told to, when the second ends, and when the trainer dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import json
import os
import pickle
import resource
import select
import signal
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import FrameType, FunctionType
from typing import TYPE_CHECKING, Any

from gspo.rewards import call
from gspo.rewards.call import Call, FromFile, Item

if TYPE_CHECKING:
    import asyncio  # which takes as long to import as all else here, and few functions need it

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_ERROR_LENGTH = 4000
"""Characters of a traceback that are sent: the end, where the cause stands."""
_OURS = (__file__, call.__file__)
"""Files whose frames lead to the function, and tell its author nothing."""


# ------------------------------------------------------------------------------ the warden


def guard(requests: int, replies: int, life: int, memory: int) -> int:
    """Fork the worker, and see to it that nothing outlives it. Returns what the trainer reads as its exit code."""
    told: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        told.append(number)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGCHLD, lambda *_: None)  # any handler: it wakes the select
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    parent, warden = os.getppid(), os.getpid()
    worker = os.fork()
    if worker == 0:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        for descriptor in (life, woken, wake):
            os.close(descriptor)
        _work(requests, replies, memory, warden)
        os._exit(0)
    os.close(requests)
    os.close(replies)
    ended: int | None = None
    while ended is None and not told and os.getppid() == parent:
        readable, _, _ = select.select([life, woken], [], [], 1.0)
        if life in readable:  # nobody ever writes to it: it is closed, so the trainer has gone
            break
        if woken in readable:
            os.read(woken, 4096)
        ended = _reap(worker)
    _end_all(worker)
    return 0 if ended is None else ended


def _reap(worker: int) -> int | None:
    """Collect what has ended; the exit code of the worker if it is among it, 128 + its number for a signal."""
    code = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return code
        if pid == 0:
            return code
        if pid == worker:
            code = os.waitstatus_to_exitcode(status)
            code = 128 - code if code < 0 else code


def _end_all(worker: int) -> None:
    """Kill every descendant. The orphans of the killed come to the warden, until there are none."""
    while True:
        _kill(lambda: os.killpg(worker, signal.SIGKILL))  # at once, so that a fork cannot outrun it
        for pid in _children():
            _kill(lambda pid=pid: os.kill(pid, signal.SIGKILL))  # type: ignore[misc]
        try:
            os.waitpid(-1, 0)
        except ChildProcessError:
            return


def _kill(kill: Callable[[], None]) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        kill()


def _children() -> list[int]:
    """Processes whose parent is this one. Only Linux gives orphans to a warden; elsewhere the group has to do."""
    found = []
    for entry in os.listdir("/proc") if os.path.isdir("/proc") else ():
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat", "rb") as file:
                    parent = int(file.read().rpartition(b")")[2].split()[1])
            except OSError:  # it has ended
                continue
            found += [int(entry)] if parent == os.getpid() else []
    return found


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


# ------------------------------------------------------------------------------ the worker


def _work(requests: int, replies: int, memory: int, warden: int) -> None:
    os.setpgid(0, 0)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != warden:  # it died before it could be watched
        os._exit(1)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if memory:
        resource.setrlimit(resource.RLIMIT_AS, (memory, memory))
    for descriptor in (requests, replies):
        os.set_inheritable(descriptor, False)
    printed = _Tail()
    sys.stdout = sys.stderr = printed
    setup = _read(requests)
    assert setup is not None
    paths, timeout, pickled = pickle.loads(setup)
    sys.path[:] = paths
    calls = []
    for name, function, file in pickled:
        try:
            calls.append(_unpickled(function, file))
        except BaseException as error:
            _write(replies, ["failed", name, _explained(error, printed)])
            os._exit(1)
    # What starting wrote to the real stderr is evidence; from here on nobody reads what functions print.
    silence = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silence, 2)
    _write(replies, ["ready"])
    runner = _runner() if any(each.asynchronous for each in calls) else None
    while (frame := _read(requests)) is not None:
        index, items = pickle.loads(frame)
        if calls[index].asynchronous:
            assert runner is not None
            runner.run(_judge_together(calls[index], items, replies, printed, timeout))
        else:
            _judge(calls[index], items, replies, printed)


def _runner() -> asyncio.Runner:
    """One event loop for all calls: what a function keeps open belongs to it."""
    import asyncio

    return asyncio.Runner()


def _unpickled(function: bytes, file: str | None) -> Call:
    found: Call = pickle.loads(function)
    inner: Any = found.function
    if isinstance(inner, FunctionType) and file is not None:
        inner.__code__ = inner.__code__.replace(co_filename=file)
    if isinstance(inner, FromFile):
        sys.path.insert(0, str(inner.path.parent))  # also for what it imports while it runs
        found = replace(found, function=inner.load())
    if found.prepare is not None:
        found.prepare()
    return found


def _judge(function: Call, items: Sequence[Item], replies: int, printed: _Tail) -> None:
    me = os.getpid()
    for i, item in enumerate(items):
        start, printed.kept = time.monotonic(), deque(maxlen=20)
        try:
            reply = _given(function(item))
        except BaseException as error:  # a judge that calls sys.exit, or was cancelled, is a judge that crashed
            reply = "crashed", None, _explained(error, printed)
        if os.getpid() != me:  # the function forked, and this is the copy, which has nothing to say
            os._exit(0)
        now = time.monotonic()
        _write(replies, [i, *reply, now - start, now])


async def _judge_together(function: Call, items: Sequence[Item], replies: int, printed: _Tail, timeout: float) -> None:
    import asyncio

    async def one(i: int, item: Item) -> None:
        start = time.monotonic()
        try:
            reply = _given(await asyncio.wait_for(function.awaited(item), timeout * len(item.completions)))
        except TimeoutError as error:
            late = time.monotonic() - start >= timeout
            reply = ("timeout" if late else "crashed"), None, None if late else _explained(error, printed)
        except BaseException as error:
            reply = "crashed", None, _explained(error, printed)
        now = time.monotonic()
        _write(replies, [i, *reply, now - start, now])

    await asyncio.gather(*(one(i, item) for i, item in enumerate(items)))


_Reply = tuple[str, tuple[float | None, ...] | None, str | None]


def _given(values: tuple[float | None, ...]) -> _Reply:
    return ("no_verdict" if all(value is None for value in values) else "ok"), values, None


def _explained(error: BaseException, printed: _Tail) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename in _OURS:
        trace = trace.tb_next
    text = "".join(traceback.format_exception(type(error), error, trace))[-_ERROR_LENGTH:]
    said = "".join(printed.kept)[-500:]
    return text + (f"\nit had printed:\n{said}" if said.strip() else "")


class _Tail(io.TextIOBase):
    """Takes what functions print and keeps the end of it, so that a function that prints for ever fills nothing."""

    def __init__(self) -> None:
        self.kept: deque[str] = deque(maxlen=20)

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        self.kept.append(text[-500:])
        return len(text)


# ------------------------------------------------------------------------------ the pipes

HEADER = struct.Struct("!Q")
"""Length of the frame that follows."""


def _read(requests: int) -> bytes | None:
    header = _read_exactly(requests, HEADER.size)
    return None if header is None else _read_exactly(requests, HEADER.unpack(header)[0])


def _read_exactly(descriptor: int, size: int) -> bytes | None:
    parts: list[bytes] = []
    while size:
        part = os.read(descriptor, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


def _write(replies: int, line: Any) -> None:
    data = json.dumps(line).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


if __name__ == "__main__":
    sys.exit(guard(*map(int, sys.argv[1:])))
