"""What an adapter costs and saves beside training all weights: memory, seconds, bytes of a checkpoint, and parity.

`python benchmarks/lora.py [full|lora|kl-full|kl-lora]... [key=value ...]`: a short run of `gspo train` for each named side,
in a process of its own; a line a side. Peak memory is the process's largest resident set, from the start of Python on.
Seconds by phase are the medians of the steps; beside other work they say little, and seconds of a core, of the whole process, do.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

KL = ["algorithm=grpo", "algorithm.kl_coefficient=0.01"]
SIDES = {"full": [], "lora": ["model.lora=16"], "kl-full": KL, "kl-lora": [*KL, "model.lora=16"]}
BASE = {"threads": "1", "steps": "2", "prompts_per_step": "4", "eval.every": "0"}
"""Of every side, unless it is said otherwise."""


def measured(side: str, words: list[str]) -> str:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "run"
        keys = BASE | dict(word.split("=", 1) for word in [*SIDES[side], *words])
        given = [f"{key}={value}" for key, value in keys.items()]
        command = [sys.executable, "-m", "gspo.cli", "train", "demo", f"dir={folder}", *given]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(process.pid, 0)
        assert status == 0, f"{' '.join(command)}: ended with {status}"
        lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
        saved = sum(f.stat().st_size for f in (folder / "checkpoints").rglob("*.safetensors"))
    last = lines[-1]
    seconds = {
        phase: median(line.get(f"time/{phase}", 0.0) for line in lines) for phase in ("rollout", "old", "update")
    }
    return (
        f"{side}: peak {usage.ru_maxrss * 1024 / 1e9:.2f} GB; checkpoint {saved / 1e6:.1f} MB; {usage.ru_utime + usage.ru_stime:.0f} s of a core in all; "
        + ", ".join(f"{phase} {s:.1f} s" for phase, s in seconds.items())
        + f"; parity/mean {last['parity/mean']:.2g}, parity/max {last['parity/max']:.2g}, parity/signed {last['parity/signed']:.2g}"
    )


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if "=" in word]
    for side in [word for word in sys.argv[1:] if word in SIDES] or ["full", "lora"]:
        print(measured(side, words), flush=True)
