"""Settings of the process that make a CPU fast; made by the program, so that no shell has to be.

`prepare` has to run before torch is imported: OpenMP reads its environment once, when it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from gspo.errors import OutOfMemoryError

T = TypeVar("T")

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4
_MADV_HUGEPAGE = 14
_ADVISED = 3 * 2**30
"""Bytes above the heap's end that are advised at once; address space, of which what is used becomes memory."""


def prepare() -> None:
    """Quiet OpenMP waiting, a heap that keeps its pages, and large pages. Values that the user has set are kept."""
    # Idle OpenMP threads spin by default, which starves whatever else runs on the core they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_pages()
    _large_pages()


def _keep_pages() -> None:
    """Activations are allocated and freed in large blocks: with glibc's defaults each block is mapped anew and
    its pages are faulted in again, which costs more than the arithmetic on them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; musl has none
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, -1)  # never by itself
        libc.mallopt(_M_TOP_PAD, 2**26)


def _large_pages() -> None:
    """Ask for pages of 2 MiB where the heap will grow: in small ones a processor looks up an address anew for nearly
    every row of a matrix, which makes transposing three times as slow and products a fifth, most of all in a virtual machine.

    Linux gives them to those who ask (its usual setting `madvise`). The heap takes its next blocks from the advised room.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not (hasattr(libc, "madvise") and hasattr(libc, "malloc_trim")):
        return
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.argtypes, libc.madvise.argtypes = [ctypes.c_void_p], [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    room = libc.malloc(_ADVISED)
    if room is not None:  # there may be a limit on addresses
        libc.madvise(-(-room // 4096) * 4096, _ADVISED - 4096, _MADV_HUGEPAGE)
        libc.free(room)


def give_pages_back() -> None:
    """Return what lies free in the heap to the system: between phases that allocate blocks of other sizes, which
    would not fit into each other's gaps. Takes less than a tenth of a second."""
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is not None and hasattr(libc, "malloc_trim"):
        libc.malloc_trim(0)
        _large_pages()


def within_memory(work: Callable[[], T]) -> T:
    """The result of `work`, or OutOfMemoryError in the place of torch's own words for it."""
    import torch

    try:
        return work()
    except (RuntimeError, MemoryError) as error:
        words = str(error).splitlines()[0] if str(error) else "out of memory"
        # A CPU has no exception of its own for it.
        if not isinstance(error, torch.OutOfMemoryError | MemoryError) and "can't allocate memory" not in words:
            raise
    # Raised here, not above: that traceback holds the activations.
    raise OutOfMemoryError(words)


def set_threads(threads: int | None) -> int:
    """Use `threads` CPU threads, or as many as are found to be worth it now. Returns the number."""
    import torch

    torch.set_num_threads(threads or _worthwhile_threads())
    return torch.get_num_threads()


def _worthwhile_threads() -> int:
    """One, half or all of the cores that this process may run on: more only where they are clearly faster.

    Every operation waits for its slowest thread, so that a core that others are using (another process, or another
    guest of the same host) can make two threads slower than one.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    candidates = sorted({1, max(1, cores // 2), cores})
    if len(candidates) == 1:
        return 1
    # In turns, so that what else the machine does meets all of them alike.
    rounds = [[_seconds_of_work(threads) for threads in candidates] for _ in range(9)]
    seconds = {
        threads: statistics.median(column)
        for threads, column in zip(candidates, zip(*rounds, strict=True), strict=True)
    }
    chosen = 1
    for threads in candidates[1:]:
        chosen = threads if seconds[threads] < 0.8 * seconds[chosen] else chosen
    return chosen


def _seconds_of_work(threads: int) -> float:
    """Time of work like a layer's: products and, between them, short operations that have to be waited for."""
    import torch

    torch.set_num_threads(threads)
    x, weight = torch.ones(768, 576), torch.full((576, 576), 1e-3)
    start = time.perf_counter()
    for _ in range(4):
        y = torch.nn.functional.silu(x @ weight)
        for _ in range(6):
            y = y * 0.5 + x
    return time.perf_counter() - start
