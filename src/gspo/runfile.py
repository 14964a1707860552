"""The files that say what a run is and what it came to, read with care: people edit them, and disks damage them.

In: the paths of a run.yaml and of a journal. Out: its settings; its lines. `store`, `journal` and `view` read through it.
No torch.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from gspo import written
from gspo.errors import InputError


def read_settings(path: Path) -> dict[str, Any]:
    """What run.yaml, or a copy of it in a checkpoint, says. Raises InputError for what is no settings of a run."""
    try:
        found = written.read(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, ValueError, OSError) as error:
        raise InputError(f"{path}: damaged, it cannot be read as YAML: {error}") from error
    if not isinstance(found, dict) or not isinstance(found.get("about", {}), dict):
        raise InputError(f"{path}: damaged, it does not hold the settings of a run")
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal, none if there is no file; a last line that was cut off while it was written is left out.

    Raises InputError for a line that tells of no step.
    """
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    return [_line(path, number, line) for number, line in enumerate(lines, start=1)]


def _line(path: Path, number: int, line: bytes) -> dict[str, Any]:
    where = f"{path}: line {number} is damaged"
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} ({error}): mend or remove that line") from error
    if not isinstance(found, dict) or type(found.get("step")) is not int:
        raise InputError(f"{where}, it tells of no step: mend or remove that line")
    return found
