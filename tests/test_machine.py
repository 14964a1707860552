"""The process settles its own threads and heap, and leaves alone what the user has set."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

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


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's heap")
def test_what_lies_free_in_the_heap_goes_back_to_the_system() -> None:
    """Blocks freed below one that is still in use stay with the process until they are given back."""
    script = """
import resource
from gspo import machine

machine.prepare()
import torch


def held():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize() / 2**20


freed = [torch.ones(2**20) for _ in range(100)]  # 4 MiB each
kept = torch.ones(1000)
del freed
before = held()
machine.give_pages_back()
print(before - held())
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert float(done.stdout) > 350, done.stderr


def _asked_for() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.is_file() and "[madvise]" in setting.read_text()


@pytest.mark.skipif(not _asked_for(), reason="Linux where large pages go to those who ask")
def test_the_heap_asks_for_large_pages() -> None:
    """Before anything is allocated, and again when pages have gone back."""
    script = """
from gspo import machine

machine.prepare()
import torch


def large():
    lines = open("/proc/self/smaps_rollup").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("AnonHugePages")) / 1024


for _ in range(2):
    before = large()
    x = torch.ones(2**26)  # 256 MiB
    print(large() - before)
    del x
    machine.give_pages_back()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert [float(word) > 240 for word in done.stdout.split()] == [True, True], done.stdout + done.stderr
