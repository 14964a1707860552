"""What a user's file has, found out in a process that can be killed: importing it may print, hang or end the process.

In: a `FromFile`. Out: what is `Seen` of the function that it names. `own.py` asks through a pool of one worker, in which
`Look` runs. The standard library alone is imported here.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gspo.rewards.call import FromFile, Work, is_async

_Parameters = Sequence[tuple[str, str, bool]]


@dataclass(frozen=True)
class Seen:
    """A name of a file, as far as a caller has to know it. Every field has a form in JSON."""

    functions: Sequence[str]
    """What the file itself has that can be called."""
    exists: bool
    name: str = ""
    """What it calls itself."""
    kind: str = ""
    """Its type."""
    callable: bool = False
    asynchronous: bool = False
    parameters: _Parameters | None = None
    """Name and kind of each, and whether it has a default; None: they cannot be read."""
    fault: str = ""
    """Why not."""

    def signature(self) -> inspect.Signature:
        """As `inspect.signature` gives it, but for the values of defaults. Raises ValueError if it cannot be read."""
        if self.parameters is None:
            raise ValueError(self.fault)
        return inspect.Signature(
            [
                inspect.Parameter(
                    name, getattr(inspect.Parameter, kind), default=None if default else inspect.Parameter.empty
                )
                for name, kind, default in self.parameters
            ]
        )


@dataclass(frozen=True)
class Look:
    """What the worker does: it runs the file and says what it found. It has the shape of a `Call`."""

    source: FromFile
    function: None = None
    prepare: None = None
    asynchronous: bool = False

    def __call__(self, _: Work) -> tuple[dict[str, Any]]:
        """The fields of `Seen`. Raises whatever running the file raises."""
        module, name = self.source.module(), self.source.name
        own = [k for k, v in vars(module).items() if callable(v) and getattr(v, "__module__", None) == module.__name__]
        if not name or not hasattr(module, name):
            return ({"functions": own, "exists": False},)
        found = getattr(module, name)
        parameters, fault = _parameters(found)
        return (
            {
                "functions": own,
                "exists": True,
                "name": str(getattr(found, "__name__", type(found).__name__)),
                "kind": type(found).__name__,
                "callable": callable(found),
                "asynchronous": is_async(found),
                "parameters": parameters,
                "fault": fault,
            },
        )


def _parameters(found: Any) -> tuple[_Parameters | None, str]:
    try:
        listed = inspect.signature(found).parameters.values()
    except (TypeError, ValueError) as error:
        return None, str(error)
    return [(p.name, p.kind.name, p.default is not inspect.Parameter.empty) for p in listed], ""
