"""The whole line of post-training, on a task whose true reward is known: SFT, a reward model, then reinforcement.

In: a folder, seeds. Out: runs, a report, and a line an algorithm. `make rlhf` runs this file; each stage is a process of
the command line, from the recipes in `recipes/rlhf/`.

    DIR/sft, DIR/reward        the first two stages
    DIR/NAME-SEED              the third, by every algorithm of ALGORITHMS that this version trains
    DIR/few, DIR/few-NAME-SEED the same by a reward model of few pairs
    DIR/report.md, *.svg       side by side

Called again, it goes on: what is finished is not run twice.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import resources
from pathlib import Path

from gspo import settings
from gspo.errors import InputError, RunError

STAGES = ("sft", "reward", "train")
ALGORITHMS = ("ppo", "grpo", "gspo")
FEW = 48
"""Pairs of the reward model that is to be over-optimised."""
FEW_WORDS = ("steps=60", "eval.every=20")
TRUE = "matching"
"""The rule that made the preferences."""


@dataclass(frozen=True)
class Run:
    """One process of the line."""

    name: str
    words: tuple[str, ...]
    """Of the command line, without the folder."""


@dataclass(frozen=True)
class Cost:
    """What a process took."""

    seconds: float
    cpu_seconds: float
    peak_bytes: int
    """Largest resident memory."""


@dataclass(frozen=True)
class Line:
    """The line in a folder."""

    folder: Path
    seeds: tuple[int, ...]
    words: tuple[str, ...] = ()
    """`STAGE:key=value`, laid over the recipe of a stage: sft, reward, train."""

    few_by: str | None = "grpo"
    """The algorithm that also optimises the reward of few pairs, with every seed; None: none does."""

    def over(self, stage: str) -> list[str]:
        """The words for a stage."""
        return [word.removeprefix(f"{stage}:") for word in self.words if word.startswith(f"{stage}:")]

    def trained(self) -> tuple[tuple[str, ...], dict[str, str]]:
        """Algorithms that this version trains, and why it does not train the others."""
        known, refused = [], {}
        for name in ALGORITHMS:
            try:
                settings.load(recipe("train"), [f"algorithm={name}", *self.over("train")])
                known.append(name)
            except InputError as error:
                refused[name] = str(error)
        return tuple(known), refused

    def first(self) -> Run:
        return Run("sft", ("sft", recipe("sft"), *self.over("sft")))

    def second(self, few: bool = False) -> Run:
        words = ("reward", recipe("reward"), f"model={self.folder}/sft/best")
        if few:
            return Run(
                "few", (*words, f"data.limit={FEW}", *(FEW_WORDS if not self.over("reward") else self.over("reward")))
            )
        return Run("reward", (*words, *self.over("reward")))

    def third(self, algorithm: str, seed: int, few: bool = False) -> Run:
        learned = f"reward_model:{self.folder / ('few' if few else 'reward') / 'best'}"
        rules = [{"function": learned, "weight": 1.0}, {"function": TRUE, "weight": 0.0}]
        name = f"{'few-' if few else ''}{algorithm}-{seed}"
        words = ("train", recipe("train"), f"algorithm={algorithm}", f"seed={seed}", f"model={self.folder}/sft/best")
        return Run(name, (*words, f"reward={json.dumps(rules)}", *self.over("train")))

    def run(self, runs: Sequence[Run]) -> None:
        """Run what is not finished, a process a core. Raises RunError with the last words of one that fails."""
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        with ThreadPoolExecutor(min(cores, len(runs))) as pool:
            list(pool.map(self._run, runs))

    def _run(self, run: Run) -> None:
        done = self.folder / f"{run.name}.json"
        if done.is_file():
            return
        folder, log = self.folder / run.name, self.folder / f"{run.name}.log"
        again = (folder / "run.yaml").is_file()
        words = (run.words[0], "--resume", str(folder)) if again else (*run.words, f"dir={folder}")
        print(f"{run.name}: gspo {' '.join(words)}", flush=True)
        with log.open("a") as file:
            cost = _process([sys.executable, "-m", "gspo.cli", *words], file)
        if cost is None:
            raise RunError(f"{run.name} failed; {log} ends in:\n" + "\n".join(log.read_text().splitlines()[-6:]))
        done.write_text(json.dumps(asdict(cost)))
        last = log.read_text().splitlines()[-1]
        print(
            f"{run.name}: {cost.seconds:.0f} s ({cost.cpu_seconds:.0f} of a core), {cost.peak_bytes / 1e6:.0f} MB; {last}",
            flush=True,
        )

    def cost(self, name: str) -> Cost:
        """Of a run that is finished."""
        return Cost(**json.loads((self.folder / f"{name}.json").read_text()))


def recipe(stage: str) -> str:
    """The file of a stage's recipe."""
    return str(resources.files("gspo.recipes") / "rlhf" / f"{stage}.yaml")


def _process(words: list[str], output: object) -> Cost | None:
    """Run to the end; None if it fails."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=output, stderr=subprocess.STDOUT)  # type: ignore[call-overload]
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    unit = 1 if sys.platform == "darwin" else 1024
    cpu = used.ru_utime + used.ru_stime
    return Cost(time.perf_counter() - start, cpu, used.ru_maxrss * unit) if process.returncode == 0 else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/rlhf"))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument(
        "words", nargs="*", metavar="STAGE:KEY=VALUE", help="laid over the recipe of a stage: sft, reward, train"
    )
    asked = parser.parse_args()
    if wrong := [word for word in asked.words if word.partition(":")[0] not in STAGES or "=" not in word]:
        parser.error(f"{wrong[0]!r}: words are written STAGE:KEY=VALUE, with one of {', '.join(STAGES)}")
    try:
        for last in run_line(Line(asked.dir.absolute(), tuple(range(asked.seeds)), tuple(asked.words))):
            print(last)
    except (InputError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, InputError) else 1
    return 0


def run_line(line: Line) -> list[str]:
    """Run what is not finished and write the report; the last lines, one an algorithm."""
    from gspo.lab.line_report import write

    line.folder.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    algorithms, refused = line.trained()
    few = line.few_by if line.few_by in algorithms else None
    line.run([line.first()])
    line.run([line.second(), *([line.second(few=True)] if few else [])])
    third = [line.third(name, seed) for seed in line.seeds for name in algorithms]
    line.run([*third, *(line.third(few, seed, few=True) for seed in line.seeds if few)])
    lines = write(line, algorithms, refused)
    print(f"{time.perf_counter() - start:.0f} s in all; report: {line.folder / 'report.md'}")
    for name, reason in refused.items():
        print(f"{name}: not run: {reason}")
    return lines


if __name__ == "__main__":
    sys.exit(main())
