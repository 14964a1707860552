"""Programs that a model wrote, run behind a wall: no network, no files of yours, no processes, bounded memory and time.

In: a program in parts, its stdin, a limit of seconds. Out: what came of it. `programs.py` (the reward `code`) calls `run`,
and `ready.py` calls `wall` once at the start.

Three walls, the first that passes its own test: bubblewrap (namespaces: an empty machine with the Python installation in
it, read-only), Landlock (the same rights, taken from an ordinary process), or none, if the user says so. Behind each of
the first two a seccomp filter also forbids sockets, processes and what changes the system. None of them makes a machine
safe against a fault of its kernel; a virtual machine does.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gspo.errors import InputError

MEMORY = 1 << 30
"""Bytes of address space that a program gets."""
OUTPUT = 1 << 20
"""Bytes that a program may print; then it is ended."""
_INSIDE = Path(__file__).with_name("inside.py")


@dataclass(frozen=True)
class Wall:
    """What stands between a program and this machine."""

    name: str
    description: str
    bubblewrap: str | None = None
    """Path of bwrap."""
    landlock: bool = False

    @property
    def walled(self) -> bool:
        return self.bubblewrap is not None or self.landlock


UNSAFE = Wall("none", "NO wall: a program that a model writes can do whatever you can (judging.allow_unsafe)")


@dataclass(frozen=True)
class Ended:
    """What came of a program."""

    complete: bool
    """It ran to its end: no exception, no early exit, within its limits."""
    output: str
    """What it printed, stderr included; the first `OUTPUT` bytes."""
    timed_out: bool = False


def run(wall: Wall, program: Sequence[str], *, seconds: float, stdin: str = "", memory: int = MEMORY) -> Ended:
    """Run the parts of a program one after the other, as one script, behind the wall.

    Raises:
        OSError: the wall could not be put up, or the system has no process to give; the program did not run.
    """
    word = secrets.token_hex(16)
    job = json.dumps(
        {
            "program": list(program),
            "done": word,
            "memory": memory,
            "cpu_seconds": int(seconds) + 1,
            "walled": wall.walled,
            "landlock": wall.landlock,
            "readable": _readable() if wall.landlock else [],
        }
    ).encode()
    with _started(wall) as (process, done):
        said, told, late = _talk(process, done, struct.pack("!Q", len(job)) + job + stdin.encode(), seconds)
    output = said.decode(errors="replace")
    if not told.startswith(b"walled\n") and not late:
        raise OSError(f"the wall {wall.name} could not be put up: {output.strip()[-500:] or process.returncode}")
    return Ended(told == b"walled\n" + word.encode(), output, late)


@contextlib.contextmanager
def _started(wall: Wall) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    ours, theirs = os.pipe()
    python = [os.path.realpath(sys.executable), "-I", "-S", "-B", str(_INSIDE), str(theirs)]
    try:
        process = subprocess.Popen(
            [*_bubblewrap(wall.bubblewrap), *python] if wall.bubblewrap else python,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[theirs],
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
            cwd="/",
            start_new_session=True,
        )
    except BaseException:
        os.close(ours)
        raise
    finally:
        os.close(theirs)
    try:
        yield process, ours
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # bubblewrap takes its inner process with it
        process.wait()
        os.close(ours)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


def _talk(process: subprocess.Popen[bytes], done: int, data: bytes, seconds: float) -> tuple[bytes, bytes, bool]:
    """Write its stdin and read its two pipes, until it ends or prints too much. Returns both, and whether it was late."""
    assert process.stdin is not None
    assert process.stdout is not None
    sending, receiving = process.stdin.fileno(), process.stdout.fileno()
    heard = {receiving: b"", done: b""}
    end, rest = time.monotonic() + seconds, memoryview(data)
    with selectors.DefaultSelector() as selector:
        selector.register(sending, selectors.EVENT_WRITE)
        for descriptor in heard:
            selector.register(descriptor, selectors.EVENT_READ)
        os.set_blocking(sending, False)
        open_ones = set(heard)
        while open_ones and len(heard[receiving]) < OUTPUT:
            left = end - time.monotonic()
            if left <= 0:
                return heard[receiving], heard[done], True
            for key, _ in selector.select(left):
                if key.fd == sending:
                    rest = _written(sending, rest)
                    if not rest:
                        selector.unregister(sending)
                        process.stdin.close()
                else:
                    part = os.read(key.fd, 1 << 16)
                    heard[key.fd] += part
                    if not part:
                        selector.unregister(key.fd)
                        open_ones.discard(key.fd)
    return heard[receiving], heard[done], False


def _written(descriptor: int, rest: memoryview) -> memoryview:
    try:
        return rest[os.write(descriptor, rest) :]
    except BlockingIOError:
        return rest
    except BrokenPipeError:  # it does not want to hear it
        return memoryview(b"")


# ------------------------------------------------------------------------------ what it may see


def _readable() -> list[str]:
    """The Python installation and the libraries of the system, as they are found here."""
    system = ["/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/dev/null", "/dev/urandom"]
    python = [sys.base_prefix, sys.base_exec_prefix]
    return [path for path in dict.fromkeys((*system, *python)) if os.path.exists(path)]


def _bubblewrap(bwrap: str) -> list[str]:
    words = [bwrap, "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL", "--chdir", "/"]
    for path in (*_readable(), str(_INSIDE)):
        if os.path.islink(path):
            words += ["--symlink", os.readlink(path), path]
        else:
            words += ["--dev-bind" if path.startswith("/dev/") else "--ro-bind", path, path]
    return [*words, "--remount-ro", "/", "--"]


# ------------------------------------------------------------------------------ which wall stands


@cache
def wall(allow_unsafe: bool = False) -> Wall:
    """The best wall that passes its test on this machine.

    Raises:
        InputError: none does, and the user has not said that none is needed.
    """
    found = [
        Wall("Landlock", "Landlock, seccomp and limits: no network, no files of yours, no processes", landlock=True)
    ]
    if bwrap := shutil.which("bwrap"):
        described = "bubblewrap, seccomp and limits: no network, no files of yours, no processes"
        found.insert(0, Wall("bubblewrap", described, bubblewrap=bwrap))
    failures = []
    for candidate in found:
        holes = test(candidate)
        if not holes:
            return candidate
        failures.append(f"{candidate.name}: {'; '.join(holes)}")
    if allow_unsafe:
        return UNSAFE
    why = "\n  ".join(failures)
    raise InputError(
        "programs that a model writes would run here without a wall around them:\n  "
        f"{why}\nInstall bubblewrap (apt install bubblewrap), use Linux 6.7 or newer for Landlock with TCP, or, on a machine "
        "that holds nothing of value, say judging.allow_unsafe=true"
    )


def test(candidate: Wall) -> list[str]:
    """Holes of a wall, in words: what a program behind it could do. Empty if it holds.

    A program tries to reach a port that listens, to read and write a file in the home folder, to start processes, to signal
    this one, to take twice its memory, and to run for ever.
    """
    home = Path.home() if os.access(Path.home(), os.W_OK) else Path(tempfile.gettempdir())
    with socket.create_server(("127.0.0.1", 0)) as listener, tempfile.NamedTemporaryFile("w", dir=home) as secret:
        secret.write("a secret")
        secret.flush()
        known = {
            "port": listener.getsockname()[1],
            "secret": secret.name,
            "home": str(home),
            "pid": os.getpid(),
            "memory": MEMORY,
        }
        try:
            ended = run(candidate, [f"known = {known!r}", _PROBE], seconds=20)
            late = run(candidate, ["while True: pass"], seconds=0.3)
        except OSError as error:
            return [str(error)]
    holes = [line.removeprefix("hole: ") for line in ended.output.splitlines() if line.startswith("hole: ")]
    if not ended.complete:
        holes.append(f"a harmless program does not run: {ended.output.strip()[-300:]}")
    if not late.timed_out:
        holes.append("a program that runs for ever was not ended")
    return holes


_PROBE = """
import os, signal, socket

def connect():
    socket.create_connection(("127.0.0.1", known["port"]), timeout=1)

def datagram():
    socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b"x", ("127.0.0.1", known["port"]))

def unix():
    socket.socket(socket.AF_UNIX)

def read():
    open(known["secret"]).read()

def look():
    if os.path.basename(known["secret"]) not in os.listdir(known["home"]):
        raise OSError("an empty folder of that name")

def write():
    open(known["secret"], "w").write("x")

def create():
    with open("/tmp/gspo-was-here", "w"):
        os.unlink("/tmp/gspo-was-here")

def mode():
    os.chmod(known["secret"], 0o777)

def fork():
    if os.fork() == 0:
        os._exit(0)

def execute():
    os.posix_spawn("/bin/true", ["true"], {})

def stop():
    os.kill(known["pid"], 0)

def memory():
    bytearray(2 * known["memory"])

tried = {connect: "connects to a port", datagram: "sends a datagram", unix: "opens a socket", read: "reads the home folder",
         look: "lists the home folder", write: "writes to the home folder", create: "writes to /tmp",
         mode: "changes the mode of a file", fork: "forks", execute: "starts a program", stop: "signals the trainer",
         memory: "takes more than its memory"}
for attempt, words in tried.items():
    try:
        attempt()
    except (OSError, MemoryError):
        continue
    print("hole: it", words, flush=True)
"""
