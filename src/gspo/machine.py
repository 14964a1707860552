"""Settings of the process that make a CPU fast; made by the program, so that no shell has to be.

`prepare` has to run before torch is imported: OpenMP reads its environment once, when it is loaded.
"""

from __future__ import annotations

import ctypes
import os
import sys

_M_TRIM_THRESHOLD, _M_TOP_PAD, _M_MMAP_MAX = -1, -2, -4


def prepare() -> None:
    """Quiet OpenMP waiting and a heap that keeps its pages. Values that the user has set are kept."""
    # Idle OpenMP threads spin by default, which starves whatever else runs on the core they wait for.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.platform == "linux" and not any(name.startswith("MALLOC_") for name in os.environ):
        _keep_pages()


def _keep_pages() -> None:
    """Activations are allocated and freed in large blocks: with glibc's defaults each block is mapped anew and
    its pages are faulted in again, which costs more than the arithmetic on them."""
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc; musl has none
        libc.mallopt(_M_MMAP_MAX, 0)
        libc.mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)
        libc.mallopt(_M_TOP_PAD, 2**26)


def set_threads(threads: int | None) -> int:
    """Use `threads` CPU threads, or one for each core that this process may run on. Returns the number."""
    import torch

    available = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(threads or available)
    return torch.get_num_threads()
