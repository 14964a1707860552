"""The pool against functions that misbehave, as real processes: it judges in bounded time and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gspo.errors import InputError
from gspo.rewards.call import Call, Item
from gspo.rewards.process import Pooled
from gspo.rewards.runner import Outcome, Pool
from gspo.types import Status
from processes import all_gone, marked

LOCK = threading.Lock()


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """In the environment of every process that the test starts."""
    found = uuid.uuid4().hex
    monkeypatch.setenv("MARK", found)
    return found


@contextmanager
def pool(function: Callable[..., Any], workers: int = 1, timeout: float = 1.0, **keys: Any) -> Iterator[Pool]:
    call = Call(function, group=keys.pop("group", False))
    found = Pool([Pooled("judge", call)], workers=workers, timeout=timeout, **keys)
    try:
        yield found
    finally:
        found.close()


def items(*texts: str) -> list[Item]:
    return [Item((text,), (1,), {}, "") for text in texts]


def judge(found: Pool, *texts: str) -> list[Outcome]:
    return found.results(found.submit(0, items(*texts)))


def misbehave(completion: str) -> float:
    """Does what the completion says."""
    if completion == "sleep":
        time.sleep(3600)
    elif completion == "exit":
        os._exit(3)
    elif completion == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif completion == "memory":
        return float(len(bytearray(10 * 2**30)))
    elif completion == "print":
        while True:
            print("x" * 10_000)
    elif completion == "write":
        while True:
            os.write(1, b"x" * 10_000)
            os.write(2, b"x" * 10_000)
    elif completion == "fork":
        os.fork()
    elif completion == "daemon":
        if os.fork() == 0:  # a grandchild in a session of its own, whose parent has gone
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(3600)
    elif completion == "garbage":
        for descriptor in range(3, 20):
            try:
                os.write(descriptor, b"[nonsense\n")
            except OSError:
                continue
        time.sleep(3600)
    elif completion == "close":
        os.closerange(0, 100)
    elif completion == "raise":
        raise ZeroDivisionError("by hand")
    elif completion == "none":
        return None  # type: ignore[return-value]
    return float(completion == "7")


def test_whatever_a_function_does_is_a_state_of_that_answer(mark: str) -> None:
    expected = {
        "7": Status.OK,
        "sleep": Status.TIMEOUT,
        "exit": Status.CRASHED,
        "8": Status.OK,
        "kill": Status.CRASHED,
        "memory": Status.CRASHED,
        "print": Status.TIMEOUT,
        "write": Status.TIMEOUT,
        "fork": Status.OK,
        "daemon": Status.OK,
        "garbage": Status.CRASHED,
        "close": Status.CRASHED,
        "none": Status.NO_VERDICT,
        "raise": Status.CRASHED,
    }
    start = time.monotonic()
    with pool(misbehave, workers=2, timeout=1.0, memory_gb=4) as found:
        outcomes = judge(found, *expected, "7")
        assert time.monotonic() - start < 3 * 1.0 / 2 + 5, "three time limits on two workers"
        assert [outcome.status for outcome in outcomes] == [*expected.values(), Status.OK]
        assert [outcome.values[0] for outcome in outcomes if outcome.status is Status.OK] == [1, 0, 0, 0, 1]
        assert all(o.values == (None,) for o in outcomes if o.status is not Status.OK)
        by = dict(zip(expected, outcomes, strict=False))
        words = {"exit": "exit code 3", "kill": "signal 9", "memory": "MemoryError", "raise": "by hand", "sleep": "1 s"}
        assert [name for name, word in words.items() if word not in (by[name].error or "")] == []
        assert by["sleep"].seconds >= 1.0
    assert all_gone(mark), marked(mark)


def test_a_thousand_answers_of_which_fifty_hang(mark: str) -> None:
    """Scored in the time that limit and workers allow; P15."""
    workers, timeout = 4, 0.25

    def hangs(completion: str) -> float:
        if completion.endswith(".7"):
            time.sleep(3600)
        return float(completion)

    texts = [f"{i}.7" if i % 20 == 3 else str(i) for i in range(1000)]
    with pool(hangs, workers, timeout) as found:
        start = time.monotonic()
        outcomes = judge(found, *texts)
        took = time.monotonic() - start
        hung = [i for i, outcome in enumerate(outcomes) if outcome.status is Status.TIMEOUT]
        assert hung == list(range(3, 1000, 20))
        assert all(o.values == (float(i),) for i, o in enumerate(outcomes) if i not in set(hung))
        # 50 time limits on 4 workers, and as many starts of a process of 0.1 s on one core, doubled for a busy machine.
        assert took < 50 * timeout / workers + 50 * 0.2
        assert judge(found, "1")[0].values == (1.0,), "the run goes on"
        assert len(marked(mark)) <= 2 * workers, (
            "a warden and a worker each, which the last one may still be starting, and no more"
        )
    assert all_gone(mark), marked(mark)


def test_quick_answers_travel_together_and_a_hanging_one_among_them_is_found() -> None:
    def hangs(completion: str) -> float:
        time.sleep(3600 if completion == "hang" else 0)
        return float(os.getpid())

    with pool(hangs, timeout=0.5) as found:
        judge(found, *["x"] * 50)
        outcomes = judge(found, *["x"] * 30, "hang", *["x"] * 30)
    assert [o.status for o in outcomes] == [Status.OK] * 30 + [Status.TIMEOUT] + [Status.OK] * 30
    pids = [o.values for o in outcomes]
    assert pids[29] != pids[31], "the worker was replaced"
    assert len(set(pids[31:])) == 1


def test_slow_answers_are_shared_out() -> None:
    def slow(completion: str) -> float:
        time.sleep(0.1)
        return float(os.getpid())

    with pool(slow, workers=4, timeout=5) as found:
        start = time.monotonic()
        outcomes = judge(found, *["x"] * 16)
        assert time.monotonic() - start < 1.2, "16 x 0.1 s on 4 workers"
    assert len({o.values for o in outcomes}) == 4


@pytest.mark.parametrize("first", ["trainer", "worker", "pool"])
def test_nothing_outlives_the_run_whatever_ends_first(first: str, mark: str) -> None:
    script = f"""
import os, sys, time
from gspo.rewards.call import Call, Item
from gspo.rewards.process import Pooled
from gspo.rewards.runner import Pool

def judge(completion):
    for _ in range(2):
        if os.fork() == 0:
            os.setsid()
            if os.fork():
                os._exit(0)
            time.sleep(3600)
    if completion == "hang":
        print("hanging", flush=True)
        time.sleep(3600)
    return float(os.getpid())

# no `if __name__ == "__main__"` here
pool = Pool([Pooled("judge", Call(judge))], workers=2, timeout=100)
tickets = pool.submit(0, [Item((text,), (1,), {{}}, "") for text in ["x"] * 4])
pids = {{int(o.values[0]) for o in pool.results(tickets)}}
if {first!r} == "pool":
    del pool
    print("ready", *pids, flush=True)
    time.sleep(3600)
print("ready", *pids, flush=True)
pool.results(pool.submit(0, [Item(("hang",), (1,), {{}}, "")] * 2))
"""
    trainer = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env={**os.environ})
    try:
        assert trainer.stdout is not None
        word, *pids = trainer.stdout.readline().split()
        assert word == "ready"
        if first == "pool":
            end = time.monotonic() + 3
            while len(marked(mark)) > 1 and time.monotonic() < end:
                time.sleep(0.02)
            assert marked(mark) == [trainer.pid], "a forgotten pool ends its processes"
            return
        time.sleep(0.5)
        assert len(marked(mark)) > 5
        if first == "worker":
            before = set(marked(mark))
            os.kill(int(pids[0]), signal.SIGKILL)
            time.sleep(0.5)
            assert len(before - set(marked(mark))) >= 2, "its orphans went with it"
    finally:
        trainer.kill()
        trainer.wait()
    assert all_gone(mark), marked(mark)


def test_p16_threads_and_event_loops() -> None:
    """huggingface/Math-Verify#50: limits by signal work in the main thread only."""

    def slow(completion: str) -> float:
        time.sleep(3600 if completion == "hang" else 0.01)
        return 1.0

    found: list[Outcome] = []
    with pool(slow, workers=2, timeout=1.0) as running:
        texts = ["x"] * 8 + ["hang"]
        threads = [threading.Thread(target=lambda t=t: found.extend(judge(running, t))) for t in texts]
        start = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - start < 1.0 + 3

        async def inside() -> Outcome:
            return judge(running, "x")[0]

        assert asyncio.run(inside()).values == (1.0,)
    assert sorted(o.status for o in found) == [Status.OK] * 8 + [Status.TIMEOUT]


def test_a_pool_that_a_thread_has_made_outlives_the_thread() -> None:
    made: list[Pool] = []
    thread = threading.Thread(target=lambda: made.append(Pool([Pooled("judge", Call(len))], workers=1, timeout=5)))
    thread.start()
    thread.join()
    time.sleep(0.3)
    assert judge(made[0], "four")[0].values == (4.0,)
    made[0].close()


async def waits(completion: str) -> float:
    if completion == "block":
        time.sleep(3600)
    if completion == "fail":
        raise ConnectionError("gone")
    await asyncio.sleep(3600 if completion == "hang" else 0.2)
    return float(os.getpid())


def test_async_functions_run_side_by_side_in_one_loop() -> None:
    with pool(waits, timeout=1.0) as found:
        start = time.monotonic()
        outcomes = judge(found, *["x"] * 30, "hang", "fail", *["x"] * 30)
        assert time.monotonic() - start < 2.5, "60 x 0.2 s one after the other would take 12 s"
        states = [Status.OK] * 30 + [Status.TIMEOUT, Status.CRASHED] + [Status.OK] * 30
        assert [o.status for o in outcomes] == states
        assert "gone" in (outcomes[31].error or "")
        again = judge(found, "x")[0]
        assert again.values == outcomes[0].values, "one that only waits is ended without its worker"
        assert judge(found, "block")[0].status is Status.TIMEOUT
        assert judge(found, "x")[0].status is Status.OK


def test_a_function_over_a_group_has_the_time_of_its_answers() -> None:
    def slow(completions: list[str]) -> list[float]:
        time.sleep(float(completions[0]))
        return [0.0] * len(completions)

    with pool(slow, timeout=0.3, group=True) as found:
        whole = [Item((seconds, "", "", ""), (1,) * 4, {}, "") for seconds in ("0.8", "3600")]
        outcomes = found.results(found.submit(0, whole))
    assert [o.status for o in outcomes] == [Status.OK, Status.TIMEOUT]
    assert [o.values for o in outcomes] == [(0.0,) * 4, (None,) * 4]


def test_functions_that_cannot_be_sent_or_loaded_are_refused(mark: str) -> None:
    with pytest.raises(InputError, match=r"judge: it cannot be sent (.|\n)*lock"), pool(lambda c: LOCK.acquire()):
        pass

    class Fails:
        def __init__(self) -> None:
            self.x = 1

        def __setstate__(self, state: Any) -> None:
            raise RuntimeError("not here")

        def __call__(self, completion: str) -> float:
            return 1.0

    with pytest.raises(InputError, match=r"cannot be loaded in a worker(.|\n)*not here"), pool(Fails()):
        pass
    assert all_gone(mark), marked(mark)


def test_what_was_printed_stands_below_the_traceback() -> None:
    def talks(completion: str) -> float:
        print("looking at", completion)
        return 1 / 0

    with pool(talks) as found:
        error = judge(found, "this")[0].error or ""
    assert "ZeroDivisionError" in error
    assert "looking at this" in error
    assert "test_runner.py" in error
    assert "rewards/worker.py" not in error


def test_200_kb_of_brackets_and_columns_travel() -> None:
    def depth(completion: str, tree: Any) -> float:
        return float(len(completion) + len(tree["x"]))

    found = Pool([Pooled("judge", Call(depth, {"tree": "tree"}))], workers=1, timeout=5)
    item = Item(("(" * 200_000,), (1,), {"tree": {"x": bytes(3_000_000)}, "other": lambda: 1}, "")
    assert found.results(found.submit(0, [item] * 3))[2].values == (3_200_000.0,)
    found.close()
