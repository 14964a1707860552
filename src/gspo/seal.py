"""Checksums of a checkpoint, so that a bit that turned on the disk is found before a run goes on from it.

In: a checkpoint folder. Out: `checksums.json`, and later the word that its files are still what was written. `store`
calls `seal` before a checkpoint is complete and `require_whole` on resume; `export` calls it too.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from gspo.errors import InputError

_FILE = "checksums.json"


def as_umask(folder: Path) -> None:
    """Give every file in `folder` the mode of a new one: safetensors makes its own for their owner alone."""
    new = folder / ".mode"
    new.touch()
    mode = new.stat().st_mode
    new.unlink()
    for path in folder.iterdir():
        if path.is_file():
            path.chmod(mode)


def seal(folder: Path) -> None:
    """Write the sha256 of every file in `folder`."""
    sums = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.is_file()}
    (folder / _FILE).write_text(json.dumps(sums, indent=1))


def require_whole(folder: Path) -> None:
    """Raise InputError that names a file which is missing or is not what was written.

    A folder without checksums is not taken: nothing could be said of its files.
    """
    path = folder / _FILE
    if not path.is_file():
        raise InputError(_words(path, "it is missing, so that its files cannot be checked"))
    try:
        sums: dict[str, str] = dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise InputError(_words(path, str(error))) from error
    for name, expected in sums.items():
        file = folder / name
        if not file.is_file():
            raise InputError(_words(file, "it is missing"))
        if _sha256(file) != expected:
            raise InputError(_words(file, "its sha256 is not that of the file that was written"))


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _words(path: Path, what: str) -> str:
    return f"{path} is damaged ({what}): move the folder {path.parent} away, and the run resumes from the checkpoint before it"
