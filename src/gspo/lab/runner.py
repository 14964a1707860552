"""Trials in, records out: each trial is a process of its own, a few at a time.

Stopped by a signal, it stops the processes, which save; run again, it goes on. `command` calls it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import IO

from gspo.lab.arms import Place, Record
from gspo.lab.experiment import Trial
from gspo.lab.progress import Board

_POLL = 0.2  # seconds


class StoppedError(Exception):
    """A signal ended the lab; what was done is kept."""

    def __init__(self, number: signal.Signals) -> None:
        super().__init__(number.name)
        self.signal = number


@dataclass
class _Running:
    place: Place
    process: subprocess.Popen[bytes]
    lock: IO[str]
    began: float
    before: int
    """Steps that were done before it began."""


class Runner:
    """Runs what has not been run."""

    def __init__(self, lab: Path, trials: Sequence[Trial], jobs: int, board: Board) -> None:
        self._places = [Place(lab, trial) for trial in {t.id: t for t in trials}.values()]
        self._jobs, self._board = jobs, board
        self._records = {p.trial.id: r for p in self._places if (r := p.record()) is not None}
        self._waiting = [p for p in self._places if p.trial.id not in self._records]
        self._running: list[_Running] = []
        self._stopped_by: signal.Signals | None = None

    def run(self) -> dict[str, Record]:
        """The record of every trial, by id. Raises StoppedError when a signal has ended it and its processes."""
        self._board.begin(len(self._records), len(self._places))
        with self._signals():
            while self._running or (self._waiting and self._stopped_by is None):
                self._start()
                time.sleep(_POLL)
                self._collect()
                self._show()
        if self._stopped_by is not None:
            raise StoppedError(self._stopped_by)
        return self._records

    def _start(self) -> None:
        for place in list(self._waiting):
            if len(self._running) >= self._jobs or self._stopped_by is not None:
                return
            lock = place.lock()
            if lock is None:
                self._board.blocked(place.trial)
                continue
            self._waiting.remove(place)
            done = place.record()  # by the process that had the lock
            words = None if done else place.prepare()
            if done:
                self._records[place.trial.id] = done
                lock.close()
            elif words is None:
                self._end(place, code=0, wall=place.add_wall(0.0))
                lock.close()
            else:
                self._running.append(self._spawn(place, words, lock))

    def _spawn(self, place: Place, words: list[str], lock: IO[str]) -> _Running:
        command = [sys.executable, "-m", place.trial.arm.program[0], *words]
        before = place.steps_done()
        with place.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                pass_fds=(lock.fileno(),),
                start_new_session=True,  # Ctrl-C comes to the lab, which hands it on once
            )
        self._board.started(place.trial, resumed=before)
        return _Running(place, process, lock, time.monotonic(), before)

    def _collect(self) -> None:
        for running in list(self._running):
            code = running.process.poll()
            if code is None:
                continue
            self._running.remove(running)
            seconds = time.monotonic() - running.began
            wall = running.place.add_wall(seconds)
            # A process that was stopped has saved, or had nothing to save: it is no failure.
            if self._stopped_by is None or code == 0:
                self._end(running.place, code, wall)
            running.lock.close()

    def _end(self, place: Place, code: int, wall: float) -> None:
        record = place.collect(code, wall)
        self._records[record.id] = record
        self._board.ended(record, steps=place.steps_done())

    def _show(self) -> None:
        now = time.monotonic()
        running = [(r.place.trial, r.place.steps_done() - r.before, now - r.began, r.before) for r in self._running]
        self._board.show(running, [place.trial for place in self._waiting], self._jobs)

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """The first signal is handed on to the processes, which save and end; a second one kills them."""

        def stop(number: int, frame: FrameType | None) -> None:
            first = self._stopped_by is None
            self._stopped_by = signal.Signals(number)
            for running in self._running:
                if running.process.poll() is None:
                    running.process.send_signal(number if first else signal.SIGKILL)
            if first:
                self._board.stopping(self._stopped_by, len(self._running))

        before = {each: signal.signal(each, stop) for each in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for each, handler in before.items():
                signal.signal(each, handler)
