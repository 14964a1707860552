"""What the pool of reward workers costs for functions that are cheap: answers a second, beside direct calls.

    .venv/bin/python benchmarks/reward_pool.py [--workers 2] [--answers 4096]

`direct` calls the function in this process, with nothing around it; `pool` is what a run does with a function of the user's.
Medians of five rounds, in turns, after one that warms up.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

from gspo.rewards import rules
from gspo.rewards.call import Call, Item
from gspo.rewards.process import Pooled
from gspo.rewards.runner import Pool

TEXT = "Let me see. 17 + 25 is 42, since 7 + 5 = 12. " * 8 + "The answer is 42."


def one_line(completion: str, answer: str) -> float:
    return float(completion.endswith(answer))


def a_millisecond(completion: str, answer: str) -> float:
    end = time.perf_counter() + 1e-3
    while time.perf_counter() < end:
        pass
    return 1.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--answers", type=int, default=4096)
    arguments = parser.parse_args()
    functions: list[Callable[..., float]] = [one_line, rules.number, a_millisecond]
    calls = [Call(function, {"answer": "answer"}) for function in functions]
    start = time.perf_counter()
    pool = Pool(
        [Pooled(f.__name__, c) for f, c in zip(functions, calls, strict=True)], workers=arguments.workers, timeout=10
    )
    print(f"{arguments.workers} workers started in {time.perf_counter() - start:.2f} s")
    print(
        f"{'function':<14} {'direct, us/answer':>18} {'pool, us/answer':>16} {'pool, answers/s':>16} {'64 answers, ms':>15}"
    )
    for index, (function, call) in enumerate(zip(functions, calls, strict=True)):
        count = min(arguments.answers, 1024) if function is a_millisecond else arguments.answers
        items = [Item((TEXT,), (100,), {"answer": "42"}, "a prompt") for _ in range(count)]
        rounds = [
            (_direct(call, items), _pooled(pool, index, items), _pooled(pool, index, items[:64])) for _ in range(6)
        ]
        d, p, s = (statistics.median(column) for column in zip(*rounds[1:], strict=True))
        print(
            f"{function.__name__:<14} {d / count * 1e6:>18.1f} {p / count * 1e6:>16.1f} {count / p:>16,.0f} {s * 1e3:>15.2f}"
        )
    pool.close()


def _direct(call: Call, items: list[Item]) -> float:
    start = time.perf_counter()
    for item in items:
        call(item)
    return time.perf_counter() - start


def _pooled(pool: Pool, index: int, items: list[Item]) -> float:
    start = time.perf_counter()
    pool.results(pool.submit(index, items))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
