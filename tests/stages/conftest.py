"""Shared by the tests of the stages: the command line, called in this process."""

from __future__ import annotations

from collections.abc import Callable

import pytest


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Words in; exit code, output and errors out."""
    from gspo import cli

    def call(*words: str) -> tuple[int, str, str]:
        code = cli.guarded(lambda: cli.app(list(words)))
        out, err = capsys.readouterr()
        return code, out, err

    return call
