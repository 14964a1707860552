"""Marks tests that need the engine's kernels."""

from __future__ import annotations

import pytest

from gspo.models import native


def _lacking() -> str:
    try:
        native.kernels()
    except native.UnavailableError as error:
        return str(error)
    return ""


needs_kernels = pytest.mark.skipif(bool(_lacking()), reason=_lacking())
