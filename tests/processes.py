"""Which processes are alive: those that carry a mark in their environment, which children inherit. And a run that kills itself."""

from __future__ import annotations

import os
import time
from pathlib import Path


def marked(mark: str) -> list[int]:
    """Processes, beside this one, that were started with `MARK=mark` in their environment and have not ended."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
                environment = (entry / "environ").read_bytes()
            except OSError:
                continue
            if state not in "ZX" and f"MARK={mark}".encode() in environment.split(b"\0"):
                found.append(int(entry.name))
    return found


def all_gone(mark: str, within: float = 3.0) -> bool:
    """Whether none is left after a moment."""
    end = time.monotonic() + within
    while (left := marked(mark)) and time.monotonic() < end:
        time.sleep(0.02)
    return not left


def killed_while_judging(name: str, reward: str) -> str:
    """A script that trains `tiny` in argv[1] by a function `name` that returns `reward`, and is killed at call argv[2]."""
    return f"""
import json, os, signal, sys
import gspo

folder, calls, keys = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3])
trainer, done = os.getpid(), 0

def {name}(completion):
    global done
    done += 1
    if done == calls:
        os.kill(trainer, signal.SIGKILL)
    return {reward}

gspo.train("tiny", dir=folder, reward={name}, **keys)
"""


KILLED_WHILE_JUDGING = killed_while_judging("digits", "sum(c.isdigit() for c in completion) / max(1, len(completion))")
"""A run that is killed in the middle of judging, by its worker, at the reward number `calls`: folder, calls, keys as JSON."""
