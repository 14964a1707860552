"""What a critic costs: memory and time of PPO, with a critic of its own and with a shared one, beside GSPO on the same settings.

    .venv/bin/python benchmarks/critic.py [--recipe sort] [--steps 6] [--rounds 3] [key=value ...]

Each arm is a process of `gspo train`, its peak memory what the system says of it (maximum resident set). Seconds by phase are
those of its own journal without the first step, which warms up: means over steps, medians over rounds in which the arms take
turns. Beside other work they say little; `CPU` does: the processor's seconds of a step, start and first steps of a second,
shorter run taken off. `state` is what is kept between steps, counted from the last checkpoint: float32 weights and the optimizer's moments.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ARMS = {
    "gspo": ["algorithm=gspo"],
    "ppo, critic=separate": ["algorithm=ppo", "critic=separate"],
    "ppo, critic=shared": ["algorithm=ppo", "critic=shared"],
}
PHASES = ("rollout", "old", "update", "critic")


@dataclass(frozen=True)
class Measured:
    """One run of an arm."""

    seconds: dict[str, float]
    """A step's, by phase; `step` is all of them."""
    tokens: float
    """Trained a step."""
    peak_gb: float
    state_gb: float
    cpu: float
    """Processor's seconds of the whole process."""


def measure(recipe: str, words: list[str], steps: int) -> Measured:
    """Run an arm in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        given = [*words, f"steps={steps}", f"dir={run}", "eval.every=0", "checkpoint.every=0", "threads=1"]
        process = subprocess.Popen(
            [sys.executable, "-m", "gspo.cli", "train", recipe, *given], stdout=subprocess.DEVNULL
        )
        _, status, used = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"gspo train {recipe} {' '.join(given)} failed")
        lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()][1:]
        (checkpoint,) = (run / "checkpoints").iterdir()
        state = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
        seconds = {p: statistics.fmean(line.get(f"time/{p}", 0.0) for line in lines) for p in (*PHASES, "step")}
        return Measured(
            seconds=seconds,
            tokens=statistics.fmean(line["tokens/trained"] for line in lines),
            peak_gb=used.ru_maxrss / 2**20,
            state_gb=state / 1e9,
            cpu=used.ru_utime + used.ru_stime,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--recipe", default="sort")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("words", nargs="*", help="settings of all arms, key=value")
    arguments = parser.parse_args()
    found: dict[str, list[Measured]] = {arm: [] for arm in ARMS}
    cpu: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for _ in range(arguments.rounds):
        for arm, words in ARMS.items():
            short, long = (measure(arguments.recipe, [*arguments.words, *words], 2 + n) for n in (0, arguments.steps))
            found[arm].append(long)
            cpu[arm].append((long.cpu - short.cpu) / arguments.steps)
            print(f"{arm}: CPU {cpu[arm][-1]:.2f} s a step, peak {long.peak_gb:.2f} GiB", file=sys.stderr, flush=True)
    head = [
        "arm",
        "state, GB",
        "peak, GiB",
        "tokens/step",
        *(f"{p}, s" for p in PHASES),
        "step, s",
        "CPU, s/step",
    ]
    print("| " + " | ".join(head) + " |\n|" + "---|" * len(head))
    for arm, runs in found.items():
        seconds = {p: statistics.median(r.seconds[p] for r in runs) for p in (*PHASES, "step")}
        cells = [
            arm,
            f"{runs[0].state_gb:.4g}",
            f"{statistics.median(r.peak_gb for r in runs):.2f}",
            f"{statistics.median(r.tokens for r in runs):.0f}",
            *(f"{seconds[p]:.2f}" for p in (*PHASES, "step")),
            f"{statistics.median(cpu[arm]):.2f}",
        ]
        print("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
