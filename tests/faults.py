"""Faults in real processes: `python faults.py FOLDER SCENARIO...` runs a tiny training, hurts it, lets it go on, and tells.

Each run is a process forked from one that has torch loaded and has computed nothing, so that a run costs its steps alone.
Out: one line of JSON a scenario, with what is left of the run (`remains`) beside that of an uninterrupted one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gspo
from gspo import heartbeat, learner, store
from gspo import journal as journal_module

KEYS: dict[str, Any] = dict(
    model="random-dense",
    steps=6,
    prompts_per_step=3,
    group_size=4,
    threads=1,
    data={"source": "addition:0-9", "limit": 5},  # an epoch ends in the midst of steps 2, 4 and 5
    reward="regex:[0-9]",
    judging={"workers": 1},
    sampling={"max_new_tokens": 4},
    optimizer={"learning_rate": 3e-3, "schedule": "linear"},
    algorithm={"name": "gspo", "updates_per_step": 3},
    eval={"every": 3, "limit": 3},
    checkpoint={"every": 2, "keep": 2},
    guard="off",  # a fault must end the run here; that the guard would mend it is tested elsewhere
)
TRIES = 60
"""Runs at most until all kills are made."""


# ------------------------------------------------------------------------------ processes


def start(folder: Path, hurt: Callable[[], None] | None = None, **keys: Any) -> int:
    """Train in `folder`, or go on there, in a process of its own; `hurt` is called in it first. Returns its pid."""
    pid = os.fork()
    if pid:
        return pid
    with (folder.parent / f"{folder.name}.log").open("a") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    code = 70
    try:
        if hurt is not None:
            hurt()
        begun = (folder / "run.yaml").is_file()
        result = gspo.train(resume=folder, **keys) if begun else gspo.train("tiny", dir=folder, **{**KEYS, **keys})
        code = result.exit_code
    except gspo.InputError as error:
        print(f"error: {error}", flush=True)
        code = 2
    except gspo.RunError as error:
        print(f"error: {error}", flush=True)
        code = 1
    except KeyboardInterrupt:
        code = 130
    finally:
        os._exit(code)


def ended(pid: int) -> int:
    """The exit code of a process; minus the signal that killed it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def said(folder: Path) -> str:
    return (folder.parent / f"{folder.name}.log").read_text()


# ------------------------------------------------------------------------------ what is left


def remains(folder: Path) -> dict[str, str]:
    """All that has to be the same: the journal but for its clocks, every answer, the weights, the moments."""
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    plain = {
        f"{line['step']} {k}": json.dumps(v) for line in lines for k, v in line.items() if not k.startswith("time/")
    }
    last = sorted((folder / "checkpoints").glob("[0-9]*"))[-1]
    files = [*sorted((folder / "rollouts").iterdir()), last / "model.safetensors", last / "optimizer.safetensors"]
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    return {**plain, "checkpoint": last.name, **found}


def whole(folder: Path) -> dict[str, str]:
    """The run that nothing happened to; made once."""
    path = folder / "whole"
    if not path.exists():
        assert ended(start(path)) == 0, said(path)
        lines = [json.loads(line) for line in (path / "journal.jsonl").read_text().splitlines()]
        assert all(line["updates/done"] for line in lines), (
            "a run whose weights stay would be the same whatever happened"
        )
    return remains(path)


def differing(folder: Path, run: Path) -> list[str]:
    expected, found = whole(folder), remains(run)
    return sorted(key for key in {**expected, **found} if expected.get(key) != found.get(key))


# ------------------------------------------------------------------------------ scenarios


def random_kills(folder: Path, kills: int = 20) -> dict[str, Any]:
    """kill -9 at random moments of runs that go on each time, until there were `kills`; every run is then finished."""
    began = time.monotonic()
    assert ended(start(folder / "timed")) == 0
    length = time.monotonic() - began
    assert not differing(folder, folder / "timed")
    generator, killed, finished, bad = random.Random(7), 0, 0, []
    run = folder / "killed-0"
    for _ in range(TRIES):
        last = killed == kills
        pid = start(run)
        if not last:
            time.sleep(generator.uniform(0.1, 0.9) * length)
            os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        killed += code == -9
        if code == 2 and "so nothing is left" in said(run).splitlines()[-1]:
            code = 0  # killed when all was done and saved
        if code not in (0, -9):
            bad.append(said(run)[-2000:])
            break
        if code == 0:
            finished += 1
            bad += differing(folder, run)
            run = folder / f"killed-{finished}"
            if last:
                break
    return {"killed": killed, "finished": finished, "differing": bad}


def _die(*_: Any, **__: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _nth(call: Any, n: int, instead: Callable[..., Any]) -> Any:
    count = iter(range(1, 10**6))
    return lambda *args, **keys: (instead if next(count) == n else call)(*args, **keys)


def _half_a_line(self: Any, metrics: dict[str, Any]) -> None:
    with self._path.open("a") as file:
        file.write(json.dumps(metrics)[:100])
    _die()


MOMENTS: dict[str, Callable[[], None]] = {
    "between update and checkpoint": lambda: setattr(store.Store, "save", _nth(store.Store.save, 2, _die)),
    "in the middle of a save": lambda: setattr(store, "save_file", _nth(store.save_file, 2, _die)),
    "before a checkpoint has its name": lambda: setattr(store, "_sync", _nth(store._sync, 2, _die)),
    "before an old checkpoint goes": lambda: setattr(store.Store, "settle", _nth(store.Store.settle, 4, _die)),
    "before the line of the journal": lambda: setattr(
        journal_module.Lines, "append", _nth(journal_module.Lines.append, 5, _die)
    ),
    "in the middle of a line": lambda: setattr(
        journal_module.Lines, "append", _nth(journal_module.Lines.append, 4, _half_a_line)
    ),
    "between two updates": lambda: setattr(learner.Learner, "_step", _nth(learner.Learner._step, 8, _die)),
}


def moments(folder: Path) -> dict[str, Any]:
    found = {}
    for i, (name, hurt) in enumerate(MOMENTS.items()):
        run = folder / f"moment-{i}"
        code = ended(start(run, hurt))
        again = ended(start(run))
        found[name] = [code, again, differing(folder, run) if again == 0 else said(run)[-2000:]]
    return found


def signals(folder: Path) -> dict[str, Any]:
    """Each signal in the middle of a run, then to the end."""
    found = {}
    for name, number in (("SIGINT", signal.SIGINT), ("SIGTERM", signal.SIGTERM)):
        run = folder / name
        pid = start(run)
        _until_step(run, 1)
        os.kill(pid, number)
        code = ended(pid)
        saved = sorted(path.name for path in run.glob("checkpoints/[0-9]*"))[-1]
        lines = (run / "journal.jsonl").read_text().splitlines()
        again = ended(start(run))
        found[name] = [code, int(saved) == json.loads(lines[-1])["step"], again, differing(folder, run)]
    return found


def slow() -> None:
    """Step 4 takes a minute, in a process that was started as a shell's background job: it ignores SIGINT."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    journal_module.Lines.append = _nth(journal_module.Lines.append, 4, lambda *_: time.sleep(60))  # type: ignore[method-assign]


def second_signal(folder: Path) -> dict[str, Any]:
    """SIGINT twice, while a step is long: it ends at once, and goes on from the last checkpoint."""

    run = folder / "second"
    pid = start(run, slow)
    _until_step(run, 3)
    time.sleep(0.3)
    os.kill(pid, signal.SIGINT)
    time.sleep(0.3)
    began = time.monotonic()
    os.kill(pid, signal.SIGINT)
    code, seconds = ended(pid), time.monotonic() - began
    return {"code": code, "seconds": seconds, "again": ended(start(run)), "differing": differing(folder, run)}


def _until_step(run: Path, step: int) -> None:
    until = time.monotonic() + 120
    path = run / "journal.jsonl"
    while time.monotonic() < until and (not path.exists() or path.read_bytes().count(b"\n") < step):
        time.sleep(0.005)


def two_processes(folder: Path) -> dict[str, Any]:
    """A second process on a run that is going on."""

    run = folder / "locked"
    pid = start(run, slow)
    _until_step(run, 3)
    code = ended(start(run))
    words = said(run).splitlines()[-1]
    os.kill(pid, signal.SIGKILL)
    ended(pid)
    return {
        "code": code,
        "named": f"pid {pid}" in words,
        "again": ended(start(run)),
        "differing": differing(folder, run),
    }


def clock(folder: Path) -> dict[str, Any]:
    """The clock of the machine jumps by an hour whenever it is read: further and further back, forward, to and fro."""
    real, found = time.time, {}
    for name, hours in {"back": lambda n: -n, "forward": lambda n: n, "to and fro": lambda n: n * (-1) ** n}.items():

        def jump(hours: Callable[[int], int] = hours) -> None:
            steps = iter(range(10**9))
            time.time = lambda: real() + 3600.0 * hours(next(steps))

        run = folder / f"clock-{name}"
        found[name] = [ended(start(run, jump)), differing(folder, run)]
    return found


def nan_gradient(folder: Path) -> dict[str, Any]:
    """One gradient of the 11th update is not a number."""

    def poison() -> None:
        def step(self: Any, tally: Any) -> float:
            next(iter(self.masters.values())).grad.view(-1)[0] = float("nan")
            return real(self, tally)

        real = learner.Learner._step
        learner.Learner._step = _nth(real, 11, step)  # type: ignore[method-assign]

    run = folder / "nan"
    code = ended(start(run, poison))
    words = said(run).splitlines()[-1]
    return {"code": code, "words": words, "again": ended(start(run)), "differing": differing(folder, run)}


def bit(folder: Path) -> dict[str, Any]:
    """One bit of the newest weights turns on the disk."""
    run = folder / "bit"
    third = _nth(store.Store.settle, 3, _die)  # after the second checkpoint: the first call is that of the start
    assert ended(start(run, lambda: setattr(store.Store, "settle", third))) == -9
    newest = sorted(run.glob("checkpoints/[0-9]*"))[-1]
    data = bytearray((newest / "model.safetensors").read_bytes())
    data[-1000] ^= 1
    (newest / "model.safetensors").write_bytes(data)
    code, words = ended(start(run)), said(run).splitlines()[-1]
    newest.rename(folder / "damaged")
    return {"code": code, "words": words, "again": ended(start(run)), "differing": differing(folder, run)}


def full_disk(folder: Path) -> dict[str, Any]:
    """On a file system of its own, which this process has mounted at `folder`: full, then read-only, then roomy again."""
    run = folder / "full"

    def fill() -> None:
        def filled(self: Any, *args: Any, **keys: Any) -> Any:
            filler = folder / "filler"
            filler.write_bytes(b"x" * max(0, shutil.disk_usage(folder).free - 300_000))
            return real(self, *args, **keys)

        real = store.Store.save
        store.Store.save = _nth(real, 3, filled)  # type: ignore[method-assign]

    code, words = ended(start(run, fill)), said(run).splitlines()[-1]
    kept = sorted(path.name for path in run.glob("checkpoints/*"))
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)
    os.environ["TMPDIR"] = "/tmp"
    readonly, refusal = _refused(run)
    subprocess.run(["mount", "-o", "remount,rw", str(folder)], check=True)
    (folder / "filler").unlink()
    between, told = _full_at_the_record(folder, run)
    again = ended(start(run))
    return {
        "code": code, "words": words, "kept": kept, "readonly": readonly, "refusal": refusal,
        "between": between, "told": told, "again": again, "differing": differing(folder, run),
    }  # fmt: skip


def _full_at_the_record(folder: Path, run: Path) -> tuple[int, str]:
    """The run goes on, and there is not a byte left when its next step is to be written."""
    log = Path("/tmp") / f"full-{os.getpid()}.log"  # of the file system that is not full

    def fill() -> None:
        def filled(self: Any, *args: Any, **keys: Any) -> Any:
            with contextlib.suppress(OSError), (folder / "filler").open("wb") as file:
                while True:
                    file.write(b"x" * 4096)
                    file.flush()
            return real(self, *args, **keys)

        for descriptor in (1, 2):
            os.dup2(os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND), descriptor)
        real = journal_module.Journal._write_rollouts
        journal_module.Journal._write_rollouts = filled  # type: ignore[method-assign]

    code = ended(start(run, fill))
    words = log.read_text().splitlines()[-1]
    log.unlink()
    (folder / "filler").unlink()
    return code, words


def _refused(run: Path) -> tuple[int, str]:
    """What a run says that is to go on in a folder that cannot be written to."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code, words = 0, ""
        try:
            gspo.train(resume=run)
        except gspo.InputError as error:
            code, words = 2, str(error)
        except BaseException as error:
            code, words = 70, repr(error)
        os.write(writing, words.encode())
        os._exit(code)
    os.close(writing)
    code = ended(pid)
    with os.fdopen(reading) as file:
        return code, file.read()


def changed_key(folder: Path) -> dict[str, Any]:
    """A key of run.yaml is edited between two halves of a run."""
    run = folder / "changed"
    assert ended(start(run, MOMENTS["in the middle of a line"])) == -9
    kept = (run / "run.yaml").read_text()
    (run / "run.yaml").write_text(kept.replace("temperature: 1.0", "temperature: 0.5"))
    code, words = ended(start(run)), said(run).splitlines()[-1]
    (run / "run.yaml").write_text(kept)
    return {"code": code, "words": words, "again": ended(start(run)), "differing": differing(folder, run)}


JUDGE = """
import os, time
def score(completion):
    with open({pids!r}, "a") as file:
        file.write(str(os.getpid()) + "\\n")
    time.sleep(0.1)
    return float(len(completion) % 3)
"""


def _impatient() -> None:
    heartbeat.Heartbeat.__init__.__defaults__ = (0.5,)  # seconds


def worker(folder: Path) -> dict[str, Any]:
    """The reward worker of a run is killed, or stopped for good, from outside while it judges."""
    found = {}
    for number in (signal.SIGKILL, signal.SIGSTOP):
        run, pids = folder / number.name, folder / f"{number.name}.pids"
        (folder / f"{number.name}.py").write_text(JUDGE.format(pids=str(pids)))
        reward = f"{folder / number.name}.py:score"
        pid = start(run, _impatient, reward=reward, judging={"workers": 1, "timeout": 2.0}, steps=3, eval={"every": 0})
        _until_step(run, 1)
        before = pids.read_text().count("\n")
        while pids.read_text().count("\n") < before + 3:
            time.sleep(0.002)
        os.kill(int(pids.read_text().split()[-1]), number)
        code = ended(pid)
        lines = [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()]
        found[number.name] = {
            "code": code,
            "judged": [line["rollouts/judged"] for line in lines],
            "lost": [line["rollouts/crashed"] + line["rollouts/timeout"] for line in lines],
            "said": said(run),
        }
    return found


def with_everything(folder: Path, kills: int = 4) -> dict[str, Any]:
    """A run with all that a checkpoint can hold beside weights, killed at random moments of its second half."""
    keys: dict[str, Any] = {
        "guard": "rollback",
        "max_staleness": 1,
        "steps": 8,
        "data": {"source": "addition:0-9", "limit": 12, "difficulty": [0.1, 0.9]},
        "algorithm": {"name": "gspo", "updates_per_step": 2, "resample": 1},
        "reward": "regex:[0-9]",
        "eval": {"every": 2, "limit": 4},
    }
    began = time.monotonic()
    plain, run = folder / "everything", folder / "everything-killed"
    assert ended(start(plain, **keys)) == 0, said(plain)
    length = time.monotonic() - began
    generator, killed, code = random.Random(3), 0, -9
    while code == -9:
        pid = start(run, **({} if list(run.glob("checkpoints/[0-9]*/state.json")) else keys))
        if killed < kills:
            _until_step(run, 3 + killed)  # past the first checkpoint, so that it goes on and does not begin anew
            time.sleep(generator.uniform(0.0, 0.1) * length)
            os.kill(pid, signal.SIGKILL)
        code = ended(pid)
        killed += code == -9
    expected, found = remains(plain), remains(run)
    return {
        "killed": killed, "code": code, "words": said(run),
        "differing": sorted(key for key in {**expected, **found} if expected.get(key) != found.get(key)),
        "held": json.loads(sorted(plain.glob("checkpoints/*/state.json"))[0].read_text()),
    }  # fmt: skip


def orphan(folder: Path) -> dict[str, Any]:
    """The run dies at once while it has workers and a tracker; `MARK` finds what is left of it."""
    (folder / "mine.py").write_text(
        "class T:\n    def __init__(self, about): pass\n    def log(self, step, numbers):\n"
        "        import subprocess, time\n        subprocess.Popen(['sleep', '600'])\n        time.sleep(600)\n    def finish(self): pass\n"
    )
    run = folder / "orphan"
    keys = {"trackers": f"{folder}/mine.py:T", "steps": 10**6}
    pid = start(run, **keys)
    _until_step(run, 3)
    time.sleep(1.0)
    os.kill(pid, signal.SIGKILL)
    return {"code": ended(pid)}


def main() -> None:
    folder, *names = sys.argv[1:]
    for name in names:
        found = globals()[name](Path(folder))
        print(json.dumps({name: found}), flush=True)


if __name__ == "__main__":
    main()
