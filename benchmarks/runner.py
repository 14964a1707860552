"""A worker in a process of its own, pinned, in the same environment as the other side's, and what the machine did meanwhile.

In: an interpreter, a script, a `Work`. Out: `Run`. `race.py` and `scaling.py` call `run`.
"""

from __future__ import annotations

import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from work import Work

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / ".peers"
_KEEP_PAGES = {"MALLOC_MMAP_THRESHOLD_": str(2**32), "MALLOC_TRIM_THRESHOLD_": str(2**34)}


class WorkerError(Exception):
    """A worker that gave no result."""


@dataclass(frozen=True)
class Machine:
    """Where and how workers run."""

    cores: tuple[int, ...]
    threads: int
    timeout: float
    keep_pages: bool

    def environment(self) -> dict[str, str]:
        """The user's environment with the values that make both sides alike."""
        mine = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "OMP_", "PYTHON"))}
        threads = str(self.threads)
        return {
            **mine,
            "OMP_WAIT_POLICY": "PASSIVE",
            "OMP_NUM_THREADS": threads,
            "MKL_NUM_THREADS": threads,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            **(_KEEP_PAGES if self.keep_pages else {}),
        }


def interpreter(env: str) -> Path:
    """Of our own environment, or of a peer's."""
    return Path(sys.executable) if env == "ours" else PEERS / env / "bin" / "python"


def run(env: str, script: str, work: Work, machine: Machine) -> dict[str, Any]:
    """What the worker found, with how much of its cores others took. Raises WorkerError if there is no result."""
    command = [str(interpreter(env)), str(HERE / script), json.dumps(asdict(work))]
    before, start = _ticks(machine.cores), time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=machine.environment(),
        start_new_session=True,
        preexec_fn=lambda: pin(machine.cores),
    )
    try:
        said, _ = process.communicate(timeout=machine.timeout)
    except BaseException as error:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if not isinstance(error, subprocess.TimeoutExpired):
            raise
        raise WorkerError(f"{script} was stopped after {machine.timeout:.0f} s (--timeout)") from None
    wall = time.monotonic() - start
    lines = said.strip().splitlines()
    try:
        if process.returncode:
            raise ValueError
        result = json.loads(lines[-1])
    except (ValueError, IndexError):
        end = "\n".join(lines[-25:])
        raise WorkerError(f"{script} ended with {process.returncode} and no result:\n{end}") from None
    return {**result, "wall_s": round(wall, 1), **_contention(before, _ticks(machine.cores))}


def end_on_signals() -> None:
    """A SIGTERM ends the program by an exception, so that the worker at hand ends with it."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def pin(cores: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, cores)


def cores_of(threads: int, first: int | None) -> tuple[int, ...]:
    """`threads` cores that this process may use, from core `first` on."""
    if not hasattr(os, "sched_getaffinity"):
        return ()
    allowed = sorted(os.sched_getaffinity(0))
    chosen = [core for core in allowed if first is None or core >= first][:threads]
    if len(chosen) < threads:
        raise WorkerError(f"--threads {threads}: only the cores {allowed} may be used")
    return tuple(chosen)


# ------------------------------------------------------------------------------ what the machine did


@dataclass(frozen=True)
class _Ticks:
    """Clock ticks of the pinned cores, and of the children that have ended."""

    busy: int
    idle: int
    steal: int
    own: float


def _ticks(cores: Sequence[int]) -> _Ticks | None:
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    fields = {line.split()[0]: [int(x) for x in line.split()[1:]] for line in stat.read_text().splitlines()}
    mine = [fields[f"cpu{core}"] for core in cores]
    times = os.times()
    own = (times.children_user + times.children_system) * os.sysconf("SC_CLK_TCK")
    return _Ticks(
        busy=sum(user + nice + system + irq + soft for user, nice, system, _, _, irq, soft, *_ in mine),
        idle=sum(f[3] + f[4] for f in mine),
        steal=sum(f[7] for f in mine),
        own=own,
    )


def _contention(before: _Ticks | None, after: _Ticks | None) -> dict[str, float]:
    """Shares of the worker's cores that the host (steal) and other processes here (foreign) took during its life."""
    if before is None or after is None:
        return {}
    busy, idle, steal = after.busy - before.busy, after.idle - before.idle, after.steal - before.steal
    total = max(1, busy + idle + steal)
    foreign = max(0.0, busy - (after.own - before.own))
    return {"steal": round(steal / total, 4), "foreign": round(foreign / total, 4)}


def describe_machine(machine: Machine) -> dict[str, Any]:
    """Processor, memory and accelerator, for the page."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    values = {line.partition(":")[0].strip(): line.partition(":")[2].strip() for line in lines}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
    return {
        "cpu": values.get("model name", platform.processor()),
        "cores": os.cpu_count(),
        "pinned": list(machine.cores),
        "threads": machine.threads,
        "flags": [flag for flag in ("amx_bf16", "avx512_bf16", "avx2") if flag in values.get("flags", "").split()],
        "memory_gb": round(memory, 1),
        "gpu": _gpu(),
        "system": platform.platform(),
        "malloc": "keeps its pages (both sides)" if machine.keep_pages else "as each side has it",
    }


def _gpu() -> str | None:
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() or None
    except (OSError, subprocess.CalledProcessError):
        return None


def commit() -> dict[str, Any]:
    """What was measured: the commit, and whether the sources differ from it."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    return {"commit": git("rev-parse", "HEAD") or None, "changed": bool(git("status", "--porcelain", "src"))}
