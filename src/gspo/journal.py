"""What happened, one JSON line a step and one a rollout: the source of truth for curves, viewers and trackers.

`job` calls `record` at the end of a step. Keys are flat; wall-clock figures stand only under `time/`.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean

from gspo import record
from gspo.algorithms.health import verdict
from gspo.errors import RunError
from gspo.evaluate import Evaluation
from gspo.metrics import Metrics, StepOutcome, step_metrics
from gspo.record import Fate
from gspo.runfile import read_lines


class Lines:
    """`journal.jsonl` in the folder of a run."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """Go on after step `after`: later lines and rollouts, from a run that was cut off, are set aside, never deleted."""
        self._path, self._rollouts = folder / "journal.jsonl", folder / "rollouts"
        self.aside = self._set_aside(after)
        """Where they are now; None if there were none."""

    def read(self) -> list[Metrics]:
        """The lines so far."""
        return read(self._path)

    def append(self, metrics: Metrics) -> None:
        """Write the line of a step, and see it on the disk. Raises RunError if the disk refuses."""
        with writing(self._path, metrics["step"]), self._path.open("a") as file:
            file.write(_line(metrics))
            file.flush()
            os.fsync(file.fileno())

    def _set_aside(self, after: int) -> Path | None:
        lines = read(self._path)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):  # a line that was cut off goes
            self._keep(lines)
        late = [line for line in lines if line["step"] > after]
        files = [f for f in sorted(self._rollouts.glob("*" + "[0-9]" * 8 + ".jsonl.gz")) if record.step_of(f) > after]
        if not late and not files:
            return None
        numbers = [int(old.name.split("-")[-1]) for old in self._path.parent.glob("set-aside-[0-9]*")]
        aside = self._path.parent / f"set-aside-{1 + max(numbers, default=0)}"
        aside.mkdir()
        for file in files:
            file.rename(aside / file.name)
        (aside / "journal.jsonl").write_text("".join(_line(line) for line in late))
        self._keep([line for line in lines if line["step"] <= after])
        return aside

    def _keep(self, lines: Sequence[Metrics]) -> None:
        kept = self._path.with_suffix(".tmp")
        kept.write_text("".join(_line(line) for line in lines), encoding="utf-8")
        kept.replace(self._path)


@contextmanager
def writing(path: Path, step: int) -> Iterator[None]:
    """Raises RunError if the disk refuses."""
    try:
        yield
    except OSError as error:
        raise RunError(f"{path}: step {step} could not be written: {error}") from error


class Journal:
    """Writer of `journal.jsonl` and `rollouts/` in the folder of a run."""

    def __init__(self, folder: Path, max_new_tokens: int, *, after: int = 0) -> None:
        """Go on after step `after`: later lines and files, from a run that was cut off, are set aside, never deleted."""
        self._lines = Lines(folder, after=after)
        self.aside = self._lines.aside
        self._rollouts = folder / "rollouts"
        self._rollouts.mkdir(parents=True, exist_ok=True)
        self._max_new_tokens = max_new_tokens
        self.before = self._lines.read()
        """Lines of the steps before, of a run that is gone on with."""
        self._without_signal = self.before[-1]["groups/steps_without_signal"] if self.before else 0

    def record(self, outcome: StepOutcome, watch: Callable[[Metrics], Metrics] | None = None) -> Metrics:
        """Write the step's line and its rollouts, and give back the line. Raises RunError if the disk refuses.

        `watch` sees the line before it is written, and adds keys to it.
        """
        metrics = step_metrics(outcome)
        self._without_signal = 0 if metrics["groups/signal"] else self._without_signal + 1
        metrics["groups/steps_without_signal"] = self._without_signal
        metrics["max_new_tokens"] = self._max_new_tokens
        metrics |= watch(metrics) if watch is not None else {}
        said = verdict(metrics)
        metrics |= {"verdict": said.text, "verdict/kind": said.kind, "verdict/warning": said.warning}
        with writing(self._rollouts, outcome.step):
            self._write_rollouts(outcome)
        self._lines.append(metrics)
        return metrics

    def _write_rollouts(self, outcome: StepOutcome) -> None:
        path = self._rollouts / f"{outcome.step:08d}.jsonl.gz"
        replaced = {group.ordinal for group in outcome.replaced}
        record.write(path, outcome.step, outcome.drawn, _fates(outcome), replaced)
        write_evaluations(self._rollouts, outcome.step, outcome.evaluations)


def write_evaluations(folder: Path, step: int, evaluations: Mapping[str, Evaluation]) -> None:
    """The answers of each evaluation, in a file of its own."""
    for prefix, evaluation in evaluations.items():
        path = record.evaluation_file(folder, prefix, step)
        record.write(path, record.step_of(path), evaluation.groups)


def _fates(outcome: StepOutcome) -> record.Fates:
    """What the step's updates made of each answer that had an advantage."""
    lost: dict[tuple[int, int], list[float]] = {}
    for i, update in enumerate(outcome.updates):
        batch = outcome.batches[i % len(outcome.batches)]
        for place, share in zip(batch.rollout_S.tolist(), update.tally.lost_S, strict=False):
            if share is not None:
                lost.setdefault(batch.key_R[place][:2], []).append(share)
    return {
        key[:2]: Fate(float(advantage), fmean(lost[key[:2]]) if key[:2] in lost else None)
        for batch in outcome.batches
        if batch.advantage_R is not None
        for key, advantage in zip(batch.key_R, batch.advantage_R, strict=True)
    }


def read(path: Path) -> list[Metrics]:
    """The lines of a journal; a last line that was cut off while it was written is left out."""
    return read_lines(path)


def _line(value: Metrics) -> str:
    plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
    return json.dumps(plain, ensure_ascii=False, allow_nan=False) + "\n"
