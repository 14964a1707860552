"""The process in which reward functions run: `python -m gspo.rewards.worker REQUESTS REPLIES LIFE MEMORY`.

In: the numbers of three pipes and a limit of memory. Out: one line of JSON for each answer, as soon as it is judged.
`runner.py` starts it. JSON, since a reply comes from where other people's code has run and must not be unpickled.

It is two processes: `warden.py` sees to it that nothing outlives the second.
"""

from __future__ import annotations

import io
import json
import os
import pickle
import resource
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

from gspo.rewards import call
from gspo.rewards.call import Call, FromFile, Item
from gspo.warden import guard

if TYPE_CHECKING:
    import asyncio  # which takes as long to import as all else here, and few functions need it

_ERROR_LENGTH = 4000
"""Characters of a traceback that are sent: the end, where the cause stands."""
_OURS = (__file__, call.__file__)
"""Files whose frames lead to the function, and tell its author nothing."""


# ------------------------------------------------------------------------------ the worker


def _work(requests: int, replies: int, memory: int) -> None:
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
    requests, replies, life, memory = map(int, sys.argv[1:])
    sys.exit(guard(lambda: _work(requests, replies, memory), life, theirs=(requests, replies)))
