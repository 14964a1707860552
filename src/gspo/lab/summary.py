"""What an experiment came to: its findings decided, its arms' numbers by seed.

In: an experiment, the scale it was run at, the records of its trials. Out: a `Summary`, all that the terminal, the
report and `claims.md` say about it. `command` makes it. No torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gspo.lab.arms import Record
from gspo.lab.experiment import Experiment, Finding, Scale
from gspo.lab.outcome import Outcome
from gspo.lab.rules import NOT_SEEN, OPPOSITE, SEEN, Key, Results, UndecidedError


@dataclass(frozen=True)
class Decided:
    """A finding and what its rule said."""

    claim: str
    source: str
    why: str
    word: str
    """One of the three, or `undecided`."""
    numbers: str


@dataclass(frozen=True)
class ArmNumbers:
    """An arm's outcomes, one a seed."""

    setting: str
    name: str
    command: str
    """Of its first seed."""
    seeds: tuple[int, ...]
    outcomes: tuple[Outcome, ...]

    def all(self, measure: str) -> list[float]:
        """A number of every seed, by its name among the fields of an outcome or its means; empty if it was not measured."""
        found = [getattr(o, measure, o.means.get(measure)) for o in self.outcomes]
        return [value for value in found if value is not None]


@dataclass(frozen=True)
class Summary:
    """An experiment and its results."""

    name: str
    title: str
    about: str
    scale: Scale
    seeds: int | None
    """As asked for; None: as many as the protocol says."""
    findings: tuple[Decided, ...]
    arms: tuple[ArmNumbers, ...]
    failed: tuple[str, ...]
    """Arms that have no outcome, with their last words."""
    versions: tuple[str, ...]
    ended: str
    seconds: float
    """Of all its arms' processes, one after the other."""

    @property
    def command(self) -> str:
        seeds = f" --seeds {self.seeds}" if self.seeds else ""
        return f"gspo lab {self.name} --{self.scale}{seeds}"

    @property
    def seeds_run(self) -> str:
        """How many seeds an arm has, in words."""
        counts = sorted({len(arm.seeds) for arm in self.arms if arm.seeds})
        said = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1]))) if counts else "0"
        return f"{said} seed{'s' * (said != '1')}"

    @property
    def line(self) -> str:
        """The one line that an experiment ends with."""
        first, *others = self.findings
        words = [d.word for d in others]
        more = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        parts = [first.numbers, self.seeds_run]
        parts += [f"{len(others)} more claim{'s' * (len(others) > 1)}: {more}"] if others else []
        parts += [f"{len(self.failed)} runs of arms failed"] if self.failed else []
        return f"{self.name}: {first.word} ({'; '.join(parts)})"


UNDECIDED = "undecided"


def summarise(
    experiment: Experiment, scale: Scale, seeds: int | None, records: Mapping[str, Record], now: str
) -> Summary:
    """Decide the findings. `records` are by id of their trial; one that is missing counts as failed."""
    trials = experiment.trials(scale, seeds)
    found = [records[t.id] for t in trials if t.id in records]
    by_arm: dict[Key, dict[int, Outcome]] = {t.arm.key: {} for t in trials}
    failed = []
    for trial in trials:
        record = records.get(trial.id)
        if record is not None and record.status == "finished" and record.outcome is not None:
            by_arm[trial.arm.key][trial.seed] = record.outcome
        else:
            why = record.error if record is not None else "not run"
            failed.append(f"{trial.arm.name} ({trial.arm.setting}), seed {trial.seed}: {why}")
    commands = {t.arm.key: t.command for t in reversed(trials)}
    return Summary(
        name=experiment.name,
        title=experiment.title,
        about=experiment.about,
        scale=scale,
        seeds=seeds,
        findings=tuple(_decide(f, Results(by_arm)) for f in experiment.findings_at(scale)),
        arms=tuple(
            ArmNumbers(*key, commands[key], tuple(sorted(of)), tuple(of[seed] for seed in sorted(of)))
            for key, of in by_arm.items()
        ),
        failed=tuple(failed),
        versions=tuple(sorted({r.version for r in found})),
        ended=max((r.ended for r in found), default=now),
        seconds=sum(r.wall for r in found),
    )


def _decide(finding: Finding, results: Results) -> Decided:
    try:
        verdict = finding.rule(results)
    except UndecidedError as error:
        return Decided(finding.claim, finding.source, finding.why, UNDECIDED, str(error))
    return Decided(finding.claim, finding.source, finding.why, verdict.word, verdict.numbers)


def sentence(decided: Decided) -> str:
    """A finding in words."""
    said = {
        SEEN: "Seen.",
        OPPOSITE: "The opposite was seen.",
        UNDECIDED: "Undecided, since arms failed.",
    }.get(decided.word, "Not seen at this scale.")
    return f"{said} {decided.numbers}."


def tally(summaries: Sequence[Summary]) -> str:
    """How many claims came out how."""
    words = [d.word for s in summaries for d in s.findings]
    counts = ", ".join(f"{words.count(word)} {word}" for word in (SEEN, NOT_SEEN, OPPOSITE, UNDECIDED) if word in words)
    return f"Of {len(words)} claims: {counts or 'none was tried'}"
