"""The walls around untrusted programs, each really tried; and the reward that runs programs behind them."""

from __future__ import annotations

import ctypes
import shutil
import time

import judging
import pytest

from gspo.config import Judging
from gspo.errors import InputError
from gspo.rewards import sandbox
from gspo.rewards.programs import code_of
from gspo.rewards.sandbox import UNSAFE, Wall, run

LANDLOCK = Wall("Landlock", "", landlock=True)
BUBBLEWRAP = Wall("bubblewrap", "", bubblewrap=shutil.which("bwrap") or "no bwrap here")
STANDING = [wall for wall in (LANDLOCK, BUBBLEWRAP) if not sandbox.test(wall)]


def test_a_wall_stands_here_and_the_best_is_taken() -> None:
    assert STANDING, "neither Landlock nor bubblewrap works on this machine"
    assert sandbox.wall().name == STANDING[-1].name


def test_landlock_stands_where_the_kernel_has_it() -> None:
    version = ctypes.CDLL(None).syscall(444, None, ctypes.c_size_t(0), 1)
    assert version < 4 or LANDLOCK in STANDING, sandbox.test(LANDLOCK)


def test_the_test_finds_the_holes_that_no_wall_leaves_open() -> None:
    holes = " ".join(sandbox.test(UNSAFE))
    for word in (
        "connects",
        "datagram",
        "reads the home",
        "writes to the home",
        "/tmp",
        "mode",
        "forks",
        "starts",
        "signals",
    ):
        assert word in holes
    assert "memory" not in holes, "limits stand even without a wall"
    assert "could not be put up" in " ".join(sandbox.test(Wall("broken", "", bubblewrap="/bin/false")))


@pytest.mark.parametrize("wall", STANDING, ids=lambda wall: wall.name)
def test_programs_run_and_are_bounded(wall: Wall) -> None:
    program = "import math, json, decimal, threading\nt = threading.Thread(target=lambda: print(input()))\nt.start(); t.join()"
    ended = run(wall, [program, "print(math.pi)"], seconds=10, stdin="hello\n")
    assert (ended.complete, ended.output.split()) == (True, ["hello", "3.141592653589793"])
    assert not run(wall, ["import sys; sys.exit(0)"], seconds=10).complete, "it left before the tests"
    assert "ZeroDivisionError" in run(wall, ["1/0"], seconds=10).output
    start = time.monotonic()
    assert run(wall, ["while True: pass"], seconds=0.5).timed_out
    assert run(wall, ["import time; time.sleep(100)"], seconds=0.5).timed_out
    assert time.monotonic() - start < 2.5
    loud = run(wall, ["while True: print('x' * 10000)"], seconds=10)
    assert not loud.complete
    assert len(loud.output) < 2 * sandbox.OUTPUT
    big = run(wall, ["x = bytearray(2 << 30)"], seconds=10)
    assert "MemoryError" in big.output
    bomb = run(wall, ["import os\nwhile True:\n    os.fork()"], seconds=10)
    assert "Operation not permitted" in bomb.output
    assert "ignored" not in run(wall, ["input()"], seconds=10, stdin="x" * 1_000_000 + "\n").output


@pytest.mark.parametrize("wall", STANDING, ids=lambda wall: wall.name)
def test_the_environment_does_not_get_in(wall: Wall, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "a secret")
    ended = run(wall, ["import os; print(dict(os.environ)); print(os.path.exists('/proc/self/environ'))"], seconds=10)
    assert ended.complete
    assert "secret" not in ended.output


def test_without_a_wall_it_is_refused_unless_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without bwrap, on which the inner side cannot put up Landlock."""
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    monkeypatch.setattr(sandbox, "_readable", lambda: ["/no/such/folder"])
    with pytest.raises(InputError, match=r"without a wall(.|\n)*Landlock(.|\n)*allow_unsafe"):
        sandbox.wall.__wrapped__()
    assert sandbox.wall.__wrapped__(allow_unsafe=True) is UNSAFE


# ------------------------------------------------------------------------------ the reward


ADD = "```python\ndef add(a, b):\n    return a + b\n```"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0"]


def test_code_is_right_when_its_tests_pass_and_not_when_it_evades_them() -> None:
    texts = {
        f"Here it is:\n{ADD}\nThat adds.": 1.0,
        "def add(a, b):\n    return a + b": 1.0,
        "```python\ndef add(a, b):\n    return a - b\n```": 0.0,
        "```\nimport os\nos._exit(0)\n```": 0.0,
        "```python\nraise SystemExit\n```": 0.0,
        "```python\nwhile True: pass\n```": 0.0,
        f"```python\ndef add(a, b): return 0\n```\nNo:\n{ADD}": 1.0,
        "I do not know.": 0.0,
        "": 0.0,
    }
    row = {"prompt": "add", "tests": TESTS}
    with judging.scorer(["code"], [row], timeout=2.5) as opened:
        assert judging.values(judging.judge(opened, row, *texts)) == list(texts.values())


@pytest.mark.parametrize(
    "tests",
    [
        [{"input": "1 2\n", "output": "3"}, {"input": "5 5\n", "output": "10\n"}],
        {"inputs": ["1 2\n", "5 5\n"], "outputs": ["3\n", "10\n"]},
        '{"inputs": ["1 2", "5 5"], "outputs": ["3", "10"]}',
    ],
)
def test_code_that_reads_and_prints(tests: object) -> None:
    row = {"prompt": "add", "goal": tests}
    right, wrong = "```python\nprint(sum(map(int, input().split())))\n```", "```python\nprint(3)\n```"
    with judging.scorer(["code:goal"], [row]) as opened:
        assert judging.values(judging.judge(opened, row, right, wrong)) == [1.0, 0.0]


@pytest.mark.parametrize("tests", ["", "assert add(", [], [1], {"inputs": ["1"], "outputs": []}, "[nonsense"])
def test_tests_that_are_none_are_refused(tests: object) -> None:
    rows = [{"prompt": "?", "tests": "assert True"}, {"prompt": "?", "tests": tests}]
    with pytest.raises(InputError, match="row 1"), judging.scorer(["code"], rows):
        pass


def test_the_wall_is_said() -> None:
    from gspo.config import Data
    from gspo.rewards.load import load
    from gspo.rewards.ready import Around
    from gspo.settings import load as settings
    from gspo.tasks.data import read_rows

    rows = read_rows(Data(), rows=[{"prompt": "?", "tests": "assert True"}])
    found = load(settings(None, ["reward=code"]).reward, Around(rows, "prompt", None, 100, Judging()))
    assert any(wall.name in found[0].ready.notes[0] for wall in STANDING)


def test_the_last_block_of_python_is_the_program() -> None:
    assert code_of("```bash\nls\n```\n```py\nx = 1\n```\n```json\n{}\n```") == "x = 1\n"
    assert code_of("no block") == "no block"
