"""The command `lab`: experiments by name in, lines and a report out.

In: names, scale, seeds, jobs, folder. Out: an exit code. `cli` calls it.

    DIR/report.html    curves, verdicts, every arm: one file, offline
    DIR/claims.md      claim, protocol, result, command; claims.json: what it is written from
    DIR/arms/          see `arms`
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from gspo.errors import InputError
from gspo.lab import claims, report
from gspo.lab.arms import Record, all_records
from gspo.lab.experiment import Experiment, Scale
from gspo.lab.progress import Board
from gspo.lab.runner import Runner, StoppedError
from gspo.lab.summary import Summary, sentence, summarise
from gspo.lab.table import EXPERIMENTS

_ASKED = "asked.json"
"""Which experiments this folder holds, and the scale and seeds that they were last run with."""


def run(
    experiments: Sequence[Experiment],
    *,
    scale: Scale,
    seeds: int | None,
    jobs: int | None,
    folder: Path,
    say: Callable[[str], None],
    table: Mapping[str, Experiment] = EXPERIMENTS,
) -> int:
    """Run what is not done, say a line an experiment, write the report. Returns the exit code.

    Raises InputError for settings that no run accepts, or a folder that cannot be made, before anything is started.
    """
    for experiment in experiments:
        for trial in experiment.trials(scale, seeds):
            _ = trial.id  # resolves its settings
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"dir={folder}: no folder that can be made and written to ({error.strerror})") from error
    board = Board()
    lines, failed = [], False
    try:
        for experiment in experiments:
            say(f"{experiment.title} ({experiment.name})")
            records = Runner(folder, experiment.trials(scale, seeds), jobs or cores(), board).run()
            board.close()
            _ask(folder, experiment.name, scale, seeds)
            summary = summarise(experiment, scale, seeds, records, _now())
            for decided in summary.findings:
                say(f"  {decided.claim}\n    {sentence(decided)}")
            say(summary.line)
            lines.append(summary.line)
            failed |= bool(summary.failed)
    except StoppedError as stopped:
        board.close()
        say(f"stopped by {stopped.signal.name}; the same command goes on from here")
        return 128 + stopped.signal.value
    finally:
        if lines:
            say(f"report: {write(folder, table)}")
    if len(lines) > 1:
        say("\n".join(lines))
    return 1 if failed else 0


def write(folder: Path, table: Mapping[str, Experiment]) -> Path:
    """The report and the claims of every experiment that was run in this folder; returns the report."""
    everything = all_records(folder)
    records = {record.id: record for record in everything}
    summaries = [s for name, e in table.items() if (s := _summary(folder, e, name, records)) is not None]
    (folder / "claims.json").write_bytes(claims.JSON.dump_json(tuple(summaries), indent=1))
    (folder / "claims.md").write_text(claims.page(summaries), encoding="utf-8")
    path = folder / "report.html"
    path.write_text(report.page([(s, table[s.name]) for s in summaries], everything), encoding="utf-8")
    return path


def _summary(folder: Path, experiment: Experiment, name: str, records: dict[str, Record]) -> Summary | None:
    asked = _asked(folder).get(name)
    if asked is None:
        return None
    scale, seeds = asked
    return summarise(experiment, scale, seeds, records, _now())


def _asked(folder: Path) -> dict[str, tuple[Scale, int | None]]:
    path = folder / _ASKED
    return (
        {name: (a["scale"], a["seeds"]) for name, a in json.loads(path.read_text()).items()} if path.is_file() else {}
    )


def _ask(folder: Path, name: str, scale: Scale, seeds: int | None) -> None:
    asked = _asked(folder) | {name: (scale, seeds)}
    text = json.dumps({n: {"scale": s, "seeds": k} for n, (s, k) in asked.items()}, indent=1)
    (folder / _ASKED).write_text(text + "\n")


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
