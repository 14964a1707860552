"""The process settles its own threads and heap, and leaves alone what the user has set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

from gspo import machine


@pytest.fixture(autouse=True)
def _threads_as_before() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_the_number_asked_for_is_the_number_used() -> None:
    assert machine.set_threads(1) == torch.get_num_threads() == 1


def test_more_threads_are_taken_only_where_they_are_clearly_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(4)))
    for seconds, chosen in (
        ({1: 1.0, 2: 0.6, 4: 0.3}, 4),
        ({1: 1.0, 2: 0.6, 4: 0.55}, 2),
        ({1: 1.0, 2: 0.9, 4: 2.0}, 1),
    ):
        monkeypatch.setattr(machine, "_seconds_of_work", seconds.__getitem__)
        assert machine.set_threads(None) == chosen


def test_settings_of_the_user_are_kept() -> None:
    code = "import os; from gspo import machine; machine.prepare(); print(os.environ['OMP_WAIT_POLICY'])"
    for given, found in (({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")):
        environment = {k: v for k, v in os.environ.items() if k != "OMP_WAIT_POLICY"} | given
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        assert done.stdout.strip() == found
