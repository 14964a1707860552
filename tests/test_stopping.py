"""A terminal that is closed under a run: real processes, each in a terminal of its own."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

COMMANDS = {
    "train": ["train", "tiny", "steps=500", "eval.every=0", "judging.workers=1"],
    "sft": ["sft", "tiny-dense", "steps=500", "eval.every=0", "data.source=sort:3", "data.limit=64", "batch_size=4"],
    "reward": ["reward", "letters", "steps=500", "eval.every=0", "batch_size=4"],
}


def in_terminal(words: list[str], *, ignoring: bool = False) -> tuple[subprocess.Popen[bytes], int]:
    """The process, and the end of its terminal that a window would hold."""
    window, terminal = os.openpty()

    def take() -> None:
        fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
        # Said either way: these tests may themselves be run under nohup.
        signal.signal(signal.SIGHUP, signal.SIG_IGN if ignoring else signal.SIG_DFL)

    process = subprocess.Popen(
        [sys.executable, "-m", "gspo.cli", *words],
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
        preexec_fn=take,
    )
    os.close(terminal)
    return process, window


def await_step(folder: Path, process: subprocess.Popen[bytes], done: Callable[[int], bool]) -> None:
    end = time.monotonic() + 60
    journal = folder / "journal.jsonl"
    while not (journal.exists() and done(len(journal.read_text().splitlines()))):
        assert process.poll() is None, process.returncode
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("command", list(COMMANDS))
def test_a_run_whose_terminal_is_closed_is_saved(command: str, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process, window = in_terminal([*COMMANDS[command], "threads=1", f"dir={folder}"])
    try:
        await_step(folder, process, lambda steps: steps >= 2)
        os.close(window)
        # A shell that ends hands it on too.
        process.send_signal(signal.SIGHUP)
        assert process.wait(60) == 128 + signal.SIGHUP
    finally:
        process.kill()
    done = len((folder / "journal.jsonl").read_text().splitlines())
    assert done < 500
    saved = json.loads((folder / "checkpoints" / f"{done:08d}" / "state.json").read_text())
    assert saved["step"] == done
    assert (folder / "report.html").exists()


def test_a_run_that_is_to_outlive_its_terminal_does(tmp_path: Path) -> None:
    """As under nohup."""
    folder = tmp_path / "run"
    process, window = in_terminal([*COMMANDS["train"], "threads=1", f"dir={folder}"], ignoring=True)
    try:
        await_step(folder, process, lambda steps: steps >= 1)
        before = len((folder / "journal.jsonl").read_text().splitlines())
        os.close(window)
        await_step(folder, process, lambda steps: steps >= before + 3)
        process.terminate()
        assert process.wait(60) == 128 + signal.SIGTERM, "its last words, to nobody, are no failure"
    finally:
        process.kill()
    assert list((folder / "checkpoints").glob("[0-9]*"))
