"""Trackers by name: which there are, and what each needs. Nothing of theirs is imported here.

In: the words of the key `trackers`. Out: the same, checked. `config` calls `check`, `build` calls `require`.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from gspo.errors import InputError

PACKAGES = {
    "tensorboard": "tensorboard",
    "trackio": "trackio",
    "wandb": "wandb",
    "wandb:offline": "wandb",
    "mlflow": "mlflow",
}
"""The module that each tracker imports, which is also the name of its extra."""


def check(name: str) -> str:
    """The name of a tracker. Raises ValueError, with the nearest name, for any other."""
    if name in PACKAGES or is_own(name):
        return name
    near = get_close_matches(name, PACKAGES, n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"no tracker {name!r}.{hint} There are {', '.join(PACKAGES)}, or a class of yours: file.py:Name")


def is_own(name: str) -> bool:
    """Whether it is `file.py:Name`."""
    return ".py:" in name


def require(names: Sequence[str]) -> None:
    """Raise InputError, which says how to install it, if what a tracker needs is missing."""
    for name in names:
        if is_own(name):
            file = name.rpartition(":")[0]
            if not Path(file).is_file():
                raise InputError(f"trackers={name}: no such file: {file}")
        elif importlib.util.find_spec(PACKAGES[name]) is None:
            package = PACKAGES[name]
            raise InputError(
                f"trackers={name}: needs the package {package}, which is not installed: pip install 'gspo[{package}]'"
            )
