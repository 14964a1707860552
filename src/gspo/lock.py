"""One process on one run folder.

In: the folder of a run. Out: a `Lock` that is held until it is closed or the process ends, however it ends. `store`
holds it; `build` asks early whether it could be had.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import IO

from gspo.errors import InputError

try:
    import fcntl
except ImportError:  # no such locks on this system
    fcntl = None  # type: ignore[assignment]


class Lock:
    """`run.lock` of a run, held. The kernel lets go of it with the process, so none is ever left behind."""

    def __init__(self, folder: Path) -> None:
        """Raises InputError if another process works in this folder, or the folder cannot be written to."""
        path = folder / "run.lock"
        try:
            self._file: IO[str] = path.open("a+")
        except OSError as error:
            raise InputError(f"{folder}: cannot be written to ({error.strerror}): a run needs its folder") from error
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.seek(0)
            holder = self._file.read().strip() or "unknown"
            self._file.close()
            raise InputError(
                f"{folder}: another process works on this run (pid {holder}): wait for its end, or stop it with `kill {holder}`"
            ) from None
        except OSError:  # a file system without locks: as if there were none on this system
            return
        with contextlib.suppress(OSError):  # a full disk: the lock holds all the same
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def close(self) -> None:
        self._file.close()


def require_free(folder: Path) -> None:
    """Raise InputError as `Lock` does."""
    Lock(folder).close()
