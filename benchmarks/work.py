"""What a worker is asked to do, and how it answers: shared by our side and every peer, each in its own interpreter.

In: one JSON argument. Out: one JSON line, the last of the worker's output. Standard library only.
"""

from __future__ import annotations

import json
import random
import re
import resource
import sys
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class Work:
    """One measurement. Both sides get the same values, but for those that a row changes by name."""

    model: str
    """Folder with float32 weights and tokenizer."""
    kind: str = "step"
    """What to measure; a worker refuses what it does not know."""
    variant: str = "plain"
    """Which of the peer's options are on."""
    prompts: int = 8
    group: int = 8
    new_tokens: int = 64
    """Longest answer."""
    pad: int = 0
    """About so many filler tokens stand before the question."""
    forced: bool = True
    """Every answer has exactly `new_tokens` tokens; else it ends where the model ends it."""
    updates: int = 1
    """Optimizer updates a step."""
    warmup: int = 1
    """Steps (or rollouts) done before the clock starts."""
    steps: int = 1
    """Steps (or rollouts) measured."""
    after: int = 0
    """Steps done after the clock has stopped: only the peak memory counts them."""
    threads: int = 1
    dtype: str = "bfloat16"
    micro: int = 16
    """Sequences that a peer puts through its model at once."""
    real_reward: bool = False
    """Reward the right sum, and skip groups that agree; else rewards differ within every group."""
    settings: tuple[str, ...] = ()
    """`key=value` words for our side."""
    profile: Literal["", "time", "memory"] = ""
    """Also trace what costs most of this in the measured part; the times are then not used."""


def read() -> Work:
    return Work(**json.loads(sys.argv[1]))


def emit(**result: Any) -> None:
    print(json.dumps({**result, "rss_gb": peak_rss_gb()}), flush=True)


def peak_rss_gb() -> float:
    unit = 1 if sys.platform == "darwin" else 1024
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9, 3)


def rows(work: Work) -> list[dict[str, Any]]:
    """`work.prompts` chat prompts with one-digit sums, the same on every side."""
    draw = random.Random(0)
    filler = "the quick brown fox jumps over the lazy dog. " * (work.pad // 10)
    found = []
    for _ in range(work.prompts):
        x, y = draw.randint(1, 9), draw.randint(1, 9)
        text = f"{filler}What is {x} + {y}? Answer with just the number."
        found.append({"prompt": [{"role": "user", "content": text}], "answer": str(x + y)})
    return found


def is_right(completion: str, answer: str) -> float:
    numbers = re.findall(r"-?\d+", completion)
    return float(bool(numbers) and numbers[-1] == answer)
