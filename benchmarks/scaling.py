"""How time and memory of a step grow with prompt length, group size and answer length.

    python benchmarks/scaling.py            our side
    python benchmarks/scaling.py --peer     TRL's too (hours at the long end)

Writes benchmarks/results/scaling.json, which `page.py` puts on the page.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import model
import runner
from race import OURS, RESULTS, TINY
from rows import Peer
from runner import Machine, WorkerError
from work import Work

TRL = Peer("TRL", "trl", "peers/trl_step.py", {"warmup": 0})
GRID: tuple[dict[str, int], ...] = (
    {},
    {"pad": 100},
    {"pad": 200},
    {"pad": 470},
    {"pad": 950},
    {"group": 4},
    {"group": 16},
    {"group": 32},
    {"new_tokens": 32},
    {"new_tokens": 128},
    {"new_tokens": 256},
)
"""What differs from 8 prompts of about 46 tokens x 8 answers of exactly 64."""


def point(peer: Peer, work: Work, machine: Machine) -> dict[str, Any]:
    """One measurement as the page wants it."""
    found = runner.run(peer.env, peer.script, replace(work, **peer.changes), machine)
    return {
        "side": peer.name,
        # TRL does not say how long its prompts are; they are ours.
        "prompt": found.get("prompt_tokens"),
        "group": work.group,
        "answer": work.new_tokens,
        "seconds": found["seconds"],
        "rollout": found["phases"]["rollout"],
        "update": found["phases"]["update"],
        "rss_gb": found["rss_gb"],
        "others": found.get("steal", 0) + found.get("foreign", 0),
        "run": found,
    }


def machine_of(given: argparse.Namespace) -> Machine:
    return Machine(runner.cores_of(given.threads, given.core), given.threads, given.timeout, keep_pages=True)


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    machine = machine_of(given)
    tiny = TINY if given.tiny else {}
    base = Work(model=model.folder_of(given.model, given.random_qwen3), threads=given.threads, **tiny)
    points = []
    for changes in GRID[: 2 if given.tiny else None]:
        work = replace(base, **changes)
        for peer in (OURS, TRL) if given.peer else (OURS,):
            found = point(peer, work, machine)
            found["prompt"] = found["prompt"] or points[-1]["prompt"]
            points.append(found)
            print(f"{peer.name} {changes}: {found['seconds']:.2f} s, {found['rss_gb']:.2f} GB", flush=True)
    return points


def main() -> None:
    runner.end_on_signals()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", action="store_true", help="measure TRL beside us")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--core", type=int, help="first core to pin to")
    parser.add_argument("--model", default="smollm2-135m-q4")
    parser.add_argument("--random-qwen3", choices=list(model.QWEN3))
    parser.add_argument("--timeout", type=float, default=3600)
    parser.add_argument("--tiny", action="store_true", help="two small points: does it run at all?")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    if given.peer and not runner.interpreter(TRL.env).exists():
        parser.exit(2, "no environment .peers/trl: run make peers\n")
    about = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        **runner.commit(),
        "tiny": given.tiny,
        "machine": runner.describe_machine(machine_of(given)),
        "command": "python benchmarks/scaling.py " + " ".join(sys.argv[1:]),
    }
    try:
        points = measure(given)
    except WorkerError as error:
        parser.exit(1, f"{error}\n")
    given.out.mkdir(parents=True, exist_ok=True)
    (given.out / "scaling.json").write_text(json.dumps({**about, "points": points}, indent=1) + "\n")


if __name__ == "__main__":
    main()
