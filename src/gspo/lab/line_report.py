"""PPO, GRPO and GSPO side by side, at equal rollouts and at equal time: markdown and curves.

In: the finished runs of a `Line`. Out: `report.md` and SVG files in its folder, and the last lines of `make rlhf`.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from statistics import fmean
from typing import Any

from gspo.journal import read
from gspo.lab.line import FEW, TRUE, Cost, Line
from gspo.metrics import Metrics
from gspo.view.svg import Series, chart, standalone

LEARNED = "reward/reward_model/mean"
RULE = f"reward/{TRUE}/mean"


@dataclass(frozen=True)
class Arm:
    """One run of the third stage."""

    name: str
    seed: int
    lines: tuple[Metrics, ...]
    cost: Cost
    """Of the whole process."""
    agreement: tuple[float | None, ...]
    """At each step: of two answers to a prompt on which the rule differs, how often the learned reward orders them as it
    does; None where it differs on none."""

    @property
    def held_out(self) -> list[tuple[int, float, float]]:
        """(rollouts so far, seconds so far, true reward on held-out prompts) of every evaluation."""
        found = [(0, 0.0, float(self.lines[0]["eval/start/reward"]))]
        rollouts, seconds = 0, 0.0
        for line in self.lines:
            rollouts += line["rollouts/total"]
            seconds += line["time/step"] - line.get("time/eval", 0.0)
            if "eval/reward" in line:
                found.append((rollouts, seconds, float(line["eval/reward"])))
        return found

    @property
    def seconds(self) -> float:
        """Of all steps, without evaluations."""
        return self.held_out[-1][1]

    def within(self, seconds: float) -> float:
        """True reward at the last evaluation in that time."""
        return [value for _, at, value in self.held_out if at <= seconds + 1e-9][-1]


def write(line: Line, algorithms: Sequence[str], refused: Mapping[str, str]) -> list[str]:
    """Write the report; the last lines of the command."""
    arms = {name: [_arm(line, name, seed) for seed in line.seeds] for name in algorithms}
    by = line.few_by if line.few_by in algorithms else None
    few = [_arm(line, by, seed, prefix="few-") for seed in line.seeds if by is not None]
    _draw(line.folder, arms, few)
    (line.folder / "report.md").write_text(_report(line, arms, few, refused))
    return [f"{name}: true reward {_mean(of, 0):.3f} -> {_mean(of, -1):.3f}" for name, of in arms.items()]


def _mean(arms: Sequence[Arm], place: int) -> float:
    return fmean(arm.held_out[place][2] for arm in arms)


def _arm(line: Line, name: str, seed: int, prefix: str = "") -> Arm:
    run = f"{prefix}{name}-{seed}"
    lines = tuple(read(line.folder / run / "journal.jsonl"))
    steps = sorted((line.folder / run / "rollouts").glob("[0-9]*.jsonl.gz"))  # and not those of evaluations
    return Arm(name, seed, lines, line.cost(run), tuple(_agreement(path) for path in steps))


def _agreement(path: Path) -> float | None:
    with gzip.open(path, "rt") as file:
        rows = [json.loads(row) for row in file]
    groups: dict[int, list[tuple[float, float]]] = {}
    for row in rows:
        parts = row["reward_parts"]
        if parts.get(TRUE) is not None and parts.get("reward_model") is not None:
            groups.setdefault(row["ordinal"], []).append((parts[TRUE], parts["reward_model"]))
    pairs = [(a, b) for group in groups.values() for a, b in combinations(group, 2) if a[0] != b[0]]
    return fmean(float((a[0] > b[0]) == (a[1] > b[1])) for a, b in pairs) if pairs else None


# ------------------------------------------------------------------------------ curves


def _draw(folder: Path, arms: Mapping[str, Sequence[Arm]], few: Sequence[Arm]) -> None:
    by_rollouts = [_held_out(name, of, lambda point: point[0]) for name, of in arms.items()]
    by_time = [_held_out(name, of, lambda point: point[1]) for name, of in arms.items()]
    _chart(folder / "rollouts.svg", "true reward, held out", "rollouts", by_rollouts, unit=True)
    _chart(folder / "time.svg", "true reward, held out", "seconds of training", by_time, unit=True)
    learned = [_by_step(name, of, LEARNED) for name, of in arms.items()]
    _chart(folder / "learned.svg", "learned reward, training prompts", "step", learned)
    true = [_by_step(name, of, RULE) for name, of in arms.items()]
    if few:
        true.append(_by_step(_few_name(few), few, RULE))
    _chart(folder / "true.svg", "true reward, training prompts", "step", true, unit=True)
    agreeing = [_agreeing(name, of) for name, of in arms.items()]
    if few:
        agreeing.append(_agreeing(_few_name(few), few))
    title = "learned reward's agreement with the rule, training prompts"
    _chart(folder / "agreement.svg", title, "step", agreeing, unit=True)
    paths = [_path(name, of) for name, of in arms.items()]
    _chart(folder / "over.svg", "true reward against the learned one, step by step", "learned reward", paths)
    if few:
        own = [_path(f"seed {arm.seed}", [arm]) for arm in few]
        _chart(folder / "over-few.svg", f"the same, {_few_name(few)}", "learned reward", own)


def _chart(path: Path, title: str, x: str, series: Sequence[Series], *, unit: bool = False) -> None:
    path.write_text(standalone(chart(title, x, series, unit=unit), [each.name for each in series]))


def _series(name: str, x: Sequence[float], values: Sequence[Sequence[float]]) -> Series:
    return Series(name, x, [fmean(v) for v in values], [min(v) for v in values], [max(v) for v in values])


def _held_out(name: str, arms: Sequence[Arm], x: Callable[[tuple[int, float, float]], float]) -> Series:
    points = list(zip(*(arm.held_out for arm in arms), strict=True))
    return _series(name, [fmean(x(p) for p in at) for at in points], [[p[2] for p in at] for at in points])


def _by_step(name: str, arms: Sequence[Arm], key: str) -> Series:
    lines = list(zip(*(arm.lines for arm in arms), strict=True))
    return _series(name, [at[0]["step"] for at in lines], [[line[key] for line in at] for at in lines])


def _agreeing(name: str, arms: Sequence[Arm]) -> Series:
    """Mean, lowest and highest over the seeds; a gap at a step where the rule differs on no answers."""
    at = [[a for a in each if a is not None] for each in zip(*(arm.agreement for arm in arms), strict=True)]
    middle, low, high = ([of(a) if a else None for a in at] for of in (fmean, min, max))
    return Series(name, [line["step"] for line in arms[0].lines], middle, low, high)


def _few_name(few: Sequence[Arm]) -> str:
    return f"{few[0].name}, reward model of {FEW} pairs"


def _path(name: str, arms: Sequence[Arm], window: int = 5) -> Series:
    """Means of `window` steps, one after the other, over the seeds; the true reward with its lowest and highest."""
    steps = range(0, len(arms[0].lines), window)

    def means(key: str) -> list[list[float]]:
        return [[fmean(line[key] for line in arm.lines[i : i + window]) for arm in arms] for i in steps]

    return _series(name, [fmean(at) for at in means(LEARNED)], means(RULE))


# ------------------------------------------------------------------------------ words


def _report(line: Line, arms: Mapping[str, Sequence[Arm]], few: Sequence[Arm], refused: Mapping[str, str]) -> str:
    shortest = min((arm.seconds for of in arms.values() for arm in of), default=0.0)
    head = ["algorithm", "true reward before", "at equal rollouts", f"at equal time ({shortest:.0f} s)", "highest",
            "learned reward", "agreement with the rule", "seconds", "seconds of a core", "peak memory"]  # fmt: skip
    rows = [[name, *_numbers(of, shortest)] for name, of in arms.items()]
    if few:
        rows.append([_few_name(few), *_numbers(few, shortest)])
    judged = {name: read(line.folder / name / "journal.jsonl")[-1] for name in ("reward", *(["few"] if few else []))}
    return (
        "\n\n".join(
            [
                "# SFT, a reward model, then reinforcement",
                f"True reward: the rule `{TRUE}` that made the preferences, on held-out prompts, a sampled answer each. The policies see the learned reward "
                f"alone. Seconds: of the steps, evaluations left out; of a core: of the whole process, from its start. Seeds: {len(line.seeds)}; means over them, in brackets the lowest and highest. Agreement: of two answers of a group on which the rule "
                "differs, the share that the learned reward orders as it does, at the first step and at the last. Peak memory: of the whole process, "
                "reward model included.",
                *(f"The reward model `{name}` orders {_accuracy(last)}." for name, last in judged.items()),
                _table(head, rows),
                *(f"`{name}` was not run: {reason}" for name, reason in refused.items()),
                *(f"![{name}]({name}.svg)" for name in _pictures(few)),
            ]
        )
        + "\n"
    )


def _pictures(few: Sequence[Arm]) -> list[str]:
    return ["rollouts", "time", "learned", "true", "agreement", "over", *(["over-few"] if few else [])]


def _accuracy(last: Metrics) -> str:
    m: Mapping[str, Any] = last
    return (
        f"{m['eval/accuracy']:.3f} ({m['eval/accuracy_low']:.3f} to {m['eval/accuracy_high']:.3f}) of {m['eval/pairs']} held-out pairs as the rule "
        f"does; calibration error {m['eval/calibration_error']:.3f}"
    )


def _numbers(arms: Sequence[Arm], shortest: float) -> list[str]:
    first, last = (_agreeing("", arms).middle[k] for k in (0, -1))
    return [
        _spread([arm.held_out[0][2] for arm in arms]),
        _spread([arm.held_out[-1][2] for arm in arms]),
        _spread([arm.within(shortest) for arm in arms]),
        _spread([max(value for _, _, value in arm.held_out) for arm in arms]),
        f"{fmean(arm.lines[0][LEARNED] for arm in arms):.2f} -> {fmean(arm.lines[-1][LEARNED] for arm in arms):.2f}",
        f"{_share(first)} -> {_share(last)}",
        f"{fmean(arm.seconds for arm in arms):.0f}",
        f"{fmean(arm.cost.cpu_seconds for arm in arms):.0f}",
        f"{max(arm.cost.peak_bytes for arm in arms) / 1e6:.0f} MB",
    ]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _spread(values: Sequence[float]) -> str:
    mean = f"{fmean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3f}-{max(values):.3f})"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in lines)
