"""A process that nothing of outlives: it, its children and theirs end with the trainer, whatever ends first.

In: work to do in a process of its own, and a pipe that the trainer never writes to. Out: an exit code. `rewards.worker` and
`trackers.feed` are started so. The standard library alone is imported here.

It is two processes. The first, the *warden*, does no work: it adopts whatever the second and its children leave
behind, and ends them all when it is told to, when the second ends, and when the trainer dies.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def guard(work: Callable[[], None], life: int, theirs: Sequence[int] = ()) -> int:
    """Fork a worker for `work`, and see to it that nothing outlives it.

    Args:
        life: reading end of a pipe whose writing end the trainer alone holds.
        theirs: descriptors that only the worker uses.

    Returns what the trainer reads as its exit code: the worker's, 128 + its number for a signal, 0 if it was told to end.
    """
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
        os.setpgid(0, 0)
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != warden:  # it died before it could be watched
            os._exit(1)
        work()
        os._exit(0)
    for descriptor in theirs:
        os.close(descriptor)
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
