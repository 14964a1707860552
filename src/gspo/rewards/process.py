"""One worker process as the trainer sees it, and what is sent to it.

In: functions, then frames of work. Out: lines that the worker replies. `runner.py` holds several and keeps their time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import selectors
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import cloudpickle

from gspo.errors import InputError, RunError
from gspo.rewards.call import FromFile
from gspo.rewards.worker import HEADER


@dataclass(frozen=True)
class Pooled:
    """A function that the workers know."""

    name: str
    call: Any
    """A `Call`, or what has its shape."""
    source: FromFile | None = None
    """Where each worker loads it from; None: it is sent as it is."""


class Process:
    """A started `gspo.rewards.worker`, with its pipes; nothing here blocks."""

    def __init__(self, selector: selectors.BaseSelector, memory: int) -> None:
        """Start it, and let `selector` watch what it replies. Raises RunError if the system has no process to give."""
        requests, self._requests = os.pipe()
        self._replies, replies = os.pipe()
        life, self._life = os.pipe()
        theirs = (requests, replies, life)
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by let_go
        environment = {"OMP_NUM_THREADS": "1", **os.environ}
        here = str(Path(__file__).parents[2])
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [here, os.environ.get("PYTHONPATH")]))
        # -P: a json.py in the current folder is not ours.
        command = [sys.executable, "-P", "-m", "gspo.rewards.worker", *map(str, (*theirs, memory))]
        try:
            self.popen = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._stderr,
                pass_fds=theirs,
                env=environment,
                start_new_session=True,
            )
        except OSError as error:
            raise RunError(f"a reward worker cannot be started: {error}") from error
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        for descriptor in (self._requests, self._replies):
            os.set_blocking(descriptor, False)
        self._selector = selector
        self._outgoing = memoryview(b"")
        self._incoming = b""
        self.since = time.monotonic()
        """When what it is at began: its start, or the item at hand."""
        self.ready = False
        selector.register(self._replies, selectors.EVENT_READ, self)

    def send(self, data: bytes) -> None:
        """Write what the pipe takes now; `flush` writes the rest when the selector says that it can."""
        self._outgoing = memoryview(bytes(self._outgoing) + data)
        self.flush()

    def flush(self) -> None:
        try:
            while self._outgoing:
                self._outgoing = self._outgoing[os.write(self._requests, self._outgoing) :]
        except BlockingIOError:
            self._watch_requests(True)
            return
        except OSError:  # it has ended; what it replied is still to be read
            self._outgoing = memoryview(b"")
        self._watch_requests(False)

    def receive(self) -> tuple[list[bytes], bool]:
        """The lines that have come, and whether that was the end."""
        ended = False
        with contextlib.suppress(BlockingIOError):
            while not ended:
                data = os.read(self._replies, 1 << 16)
                ended = not data
                self._incoming += data
        *lines, self._incoming = self._incoming.split(b"\n")
        return lines, ended

    def let_go(self) -> None:
        """Tell the warden, in two ways, to end its worker and all that came of it, and then itself."""
        if self._life < 0:
            return
        with contextlib.suppress(KeyError, ValueError, RuntimeError):  # the selector may be gone before
            self._watch_requests(False)
            self._selector.unregister(self._replies)
        if self.popen.poll() is None:
            self.popen.terminate()
        for descriptor in (self._requests, self._replies, self._life):
            os.close(descriptor)
        self._life = -1
        self._stderr.close()

    def how_it_ended(self) -> str:
        """In words; waits a moment for the exit code, which comes after the end of the pipe."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.popen.wait(1.0)
        code = self.popen.poll()
        if code is None:
            return "it closed its pipe, or wrote into it"
        return f"signal {code - 128}" if code > 128 else f"exit code {code}"

    def what_it_said(self) -> str:
        """What it wrote to stderr while it started."""
        self._stderr.seek(0)
        return self._stderr.read()[-2000:].decode(errors="replace").strip() or "it said nothing"

    def _watch_requests(self, watch: bool) -> None:
        watched = self._requests in self._selector.get_map()
        if watch and not watched:
            self._selector.register(self._requests, selectors.EVENT_WRITE, self)
        elif watched and not watch:
            self._selector.unregister(self._requests)


# ------------------------------------------------------------------------------ what is sent


def setup(functions: Sequence[Pooled], timeout: float) -> bytes:
    """The first frame. Raises InputError for a function that cannot be sent to another process."""
    return frame((sys.path, timeout, [(f.name, _pickled(f), _file(f)) for f in functions]))


def frame(value: Any) -> bytes:
    """A value with its length before it. Raises what pickling raises."""
    try:
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception:  # rows given from Python may hold what only cloudpickle can take
        data = cloudpickle.dumps(value)
    return HEADER.pack(len(data)) + data


def _pickled(function: Pooled) -> bytes:
    """By value where it can be: a user's module may import torch, which each worker would then load too."""
    call = function.call if function.source is None else replace(function.call, function=cast(Any, function.source))
    module = sys.modules.get(getattr(call.function, "__module__", None) or "")
    try:
        if module is not None and _is_the_users(module):
            with contextlib.suppress(Exception):
                return _by_value(call, module)
        return bytes(cloudpickle.dumps(call))
    except Exception as error:
        raise InputError(
            f"reward function {function.name}: it cannot be sent to a worker process ({type(error).__name__}: {error}): "
            "it holds what belongs to this process (an open file, a lock, a connection): make that inside the function, at its first call"
        ) from error


def _file(function: Pooled) -> str | None:
    """Where its code stands, which cloudpickle leaves out and a traceback should say."""
    code = getattr(function.call.function, "__code__", None)
    return code.co_filename if code is not None else None


def _is_the_users(module: ModuleType) -> bool:
    file = getattr(module, "__file__", None)
    installed = [sysconfig.get_path(kind) for kind in ("stdlib", "platstdlib", "purelib", "platlib")]
    ours = str(Path(__file__).parents[1])
    return file is not None and not any(Path(file).is_relative_to(folder) for folder in (*installed, ours))


def _by_value(call: Any, module: ModuleType) -> bytes:
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(call))
    finally:
        cloudpickle.unregister_pickle_by_value(module)
