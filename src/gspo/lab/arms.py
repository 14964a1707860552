"""The files of a trial: the folder of its run while it goes on, and one small JSON when it has ended.

In: a `Trial` and the lab's folder. Out: the words that start it or go on with it, and its `Record`. `runner` calls it.

    arms/<id>/        run.yaml and journal.jsonl of the run; its answers and checkpoints are deleted when it has ended
    arms/<id>.json    the Record: settings, numbers, curves, or why it failed
    arms/<id>.log     what the run said
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Literal

from pydantic import TypeAdapter, ValidationError

from gspo import __version__
from gspo.errors import InputError
from gspo.journal import read
from gspo.lab.experiment import TRAIN, Trial
from gspo.lab.outcome import Curves, Outcome, curves_of, outcome_of

GAPS = "gaps.json"
"""Written into its folder by an arm that compares gradients: distances by name."""


@dataclass(frozen=True)
class Record:
    """How a trial ended. Kept for every trial that was ever run in the folder."""

    id: str
    setting: str
    name: str
    seed: int
    command: str
    version: str
    status: Literal["finished", "failed"]
    error: str | None
    """Of a failed trial: the last line that it said."""
    ended: str
    """UTC."""
    wall: float
    """Seconds of its processes, start-up included."""
    outcome: Outcome | None
    """None if no step was done."""
    curves: Curves | None


_JSON = TypeAdapter(Record)


@dataclass(frozen=True)
class Place:
    """Where a trial's files are."""

    lab: Path
    trial: Trial

    @property
    def folder(self) -> Path:
        return self.lab / "arms" / self.trial.id

    @property
    def file(self) -> Path:
        return self.lab / "arms" / f"{self.trial.id}.json"

    @property
    def log(self) -> Path:
        return self.lab / "arms" / f"{self.trial.id}.log"

    def record(self) -> Record | None:
        """What is known of a trial that has ended; None if it is yet to be run, or failed and may be tried again."""
        found = read_record(self.file) if self.file.is_file() else None
        return found if found is not None and found.status == "finished" else None

    def steps_done(self) -> int:
        journal = self.folder / "journal.jsonl"
        return journal.read_bytes().count(b"\n") if journal.is_file() else 0

    def lock(self) -> IO[str] | None:
        """An open file that says that this trial is being run, or None if another process has it.

        The process of the trial inherits it, so that it outlives a lab that is killed.
        """
        path = self.lab / "arms" / ".locks" / self.trial.id
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("w")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            return None
        return file

    def add_wall(self, seconds: float) -> float:
        """Seconds of all processes of this trial, one that has just ended among them."""
        file = self.folder / "wall"
        total = seconds + (float(file.read_text()) if file.is_file() else 0.0)
        self.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(str(total))
        return total

    def prepare(self) -> list[str] | None:
        """Words that start the trial, or go on with it where it has a checkpoint; None if all its steps are done.

        What was left by a trial that cannot go on is deleted.
        """
        trains = self.trial.arm.program == TRAIN
        if trains and self.steps_done() >= self.trial.run.steps and self._checkpoints():
            return None
        if trains and self._checkpoints():
            return [TRAIN[1], "--resume", str(self.folder)]
        shutil.rmtree(self.folder, ignore_errors=True)
        self.log.unlink(missing_ok=True)
        return self.trial.argv(self.folder)

    def _checkpoints(self) -> bool:
        return any(self.folder.glob("checkpoints/[0-9]*/state.json"))

    def collect(self, code: int, wall: float) -> Record:
        """The record of a trial whose process ended with `code`; what it leaves on the disk becomes small."""
        journal = self.folder / "journal.jsonl"
        lines = read(journal)
        judged = any(line["reward/mean"] is not None for line in lines)
        error = None if code == 0 else self._last_words(code)
        if error is None and (not judged or len(lines) < self.trial.run.steps):
            error = f"the run ended after {len(lines)} of {self.trial.run.steps} steps"
        record = Record(
            id=self.trial.id,
            setting=self.trial.arm.setting,
            name=self.trial.arm.name,
            seed=self.trial.seed,
            command=self.trial.command,
            version=__version__,
            status="finished" if error is None else "failed",
            error=error,
            ended=datetime.now(UTC).isoformat(timespec="seconds"),
            wall=wall,
            outcome=outcome_of(lines, self._gaps()) if judged else None,
            curves=curves_of(lines) if lines else None,
        )
        draft = self.file.with_suffix(".tmp")
        draft.write_bytes(_JSON.dump_json(record, indent=1))
        draft.replace(self.file)
        for heavy in ("rollouts", "checkpoints", "start"):
            shutil.rmtree(self.folder / heavy, ignore_errors=True)
        for light in ("best", "report.html", "run.lock"):
            (self.folder / light).unlink(missing_ok=True)
        return record

    def _gaps(self) -> Mapping[str, float] | None:
        path = self.folder / GAPS
        return json.loads(path.read_text()) if path.is_file() else None

    def _last_words(self, code: int) -> str:
        said = self.log.read_text(errors="replace").strip().splitlines() if self.log.is_file() else []
        how = f"ended by signal {-code}" if code < 0 else f"exit code {code}"
        return f"{how}: {said[-1] if said else 'nothing said'}"


def read_record(path: Path) -> Record:
    """A record from its file. Raises InputError if it is damaged."""
    try:
        return _JSON.validate_json(path.read_bytes())
    except ValidationError as error:
        raise InputError(f"{path} is damaged, or of another version: remove it, and its arm is run again") from error


def all_records(lab: Path) -> list[Record]:
    """Every trial that ended in this folder, in order of time: also failed ones, and those of earlier protocols."""
    return sorted((read_record(path) for path in lab.glob("arms/*.json")), key=lambda record: record.ended)
