"""The benchmark's harness: its rows, one of them end to end at a tiny size, and the page that is made from the files."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
ROWS = {
    "step": (3, 6),
    "step-natural": (4, 8),
    "step-4-updates": (3, 6),
    "step-long": (10, 25),
    "rollout-hf": (2.5, 5),
    "rollout-vllm": (1.2, 2),
    "rollout-long": (1.5, 4),
    "update-ceiling": (0.30, 0.45),
    "memory": (0.65, None),
    "logprob-memory": (0.20, 0.10),
}


def command(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words], cwd=BENCHMARKS.parent, capture_output=True, text=True, timeout=300, check=False
    )


def race(*words: str) -> subprocess.CompletedProcess[str]:
    return command(str(BENCHMARKS / "race.py"), *words)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def made(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for results; the model that the workers load is not put among the user's."""
    monkeypatch.setenv("GSPO_CACHE", str(cache))
    return tmp_path / "results"


def row_file(**changes: Any) -> dict[str, Any]:
    """The file of a row in which gspo takes 2 s and the best of two peers 13 s."""
    row = json.loads(json.dumps(EXAMPLE))
    return {**row, **changes}


def side(name: str, median: float, **more: Any) -> dict[str, Any]:
    run = {"seconds": median, "answer_tokens": 4096, "steal": 0.01, "foreign": 0.02}
    return dict(name=name, counts=True, runs=[run], median=median, low=median, high=median, rss_gb=2.5,
                phases={"rollout": 0.5}, versions={"torch": "2.13.0"}, work={"settings": []}, **more)  # fmt: skip


EXAMPLE: dict[str, Any] = dict(
    row="step", title="a step", against="TRL", measured="the step", field="seconds", unit="s a step", must=3, aim=6,
    better="more", made="2026-01-01T00:00:00+00:00", commit="0123456789abcdef", changed=False, tiny=False,
    command="python benchmarks/race.py step", sides=[side("gspo", 2.0), side("TRL", 13.0), side("TRL, eager", 14.0)],
    best="TRL", ratio=6.5, also=[], profile=None,
    machine=dict(cpu="a CPU", cores=2, flags=["amx_bf16"], memory_gb=24, gpu=None, threads=1),
)  # fmt: skip


def write_page(results: Path, *rows: dict[str, Any]) -> str:
    results.mkdir(exist_ok=True)
    for row in rows:
        (results / f"{row['row']}.json").write_text(json.dumps(row))
    done = command(str(BENCHMARKS / "page.py"), "--results", str(results), "--out", str(results / "page.md"))
    assert done.returncode == 0, done.stderr
    return (results / "page.md").read_text()


def line_of(page: str, row: str) -> list[str]:
    (line,) = [line for line in page.splitlines() if line.startswith(f"| [{row}]")]
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_the_list_names_the_rows_with_their_bars() -> None:
    done = race("--list")
    assert done.returncode == 0, done.stderr
    found = {}
    for line in done.stdout.splitlines():
        name, must, aim = re.fullmatch(r"(\S+) +must (\S+)  aim (\S+)  .*", line).groups()
        found[name] = (float(must), None if aim == "-" else float(aim))
    assert found == ROWS


def test_an_unknown_row_is_bad_input() -> None:
    done = race("steps")
    assert done.returncode == 2
    assert "step-natural" in done.stderr


def test_a_peer_that_is_not_installed_is_bad_input() -> None:
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); import pathlib, runner, race; "
        "runner.PEERS = pathlib.Path('nowhere'); sys.argv[1:] = ['step', '--tiny', '--model', 'random-dense']; race.main()"
    )
    done = command("-c", program)
    assert done.returncode == 2
    assert "run make peers" in done.stderr


def test_one_row_end_to_end_without_its_peer(made: Path) -> None:
    words = ("rollout-hf", "--no-peer", "--model", "random-dense", "--tiny", "--repeats", "1", "--out", str(made))
    done = race(*words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ratio:" not in done.stdout
    found = json.loads((made / "rollout-hf.json").read_text())
    (ours,) = found["sides"]
    assert [run["answer_tokens"] for run in ours["runs"]] == [4 * 2 * 4]
    rates = [run["tokens_per_second"] for run in ours["runs"]]
    assert ours["low"] == min(rates) <= ours["median"] <= max(rates) == ours["high"]
    assert ours["rss_gb"] > 0.1
    assert found["ratio"] is None
    page = write_page(made)
    assert line_of(page, "rollout-hf")[-1] == "not raced"
    assert "trial at tiny size" in page


def test_every_answer_of_a_step_is_trained_on_though_rewards_agree(made: Path) -> None:
    """The worker stops by itself if a token was sampled and not trained on, or an answer is not of full length."""
    done = race("step", "--no-peer", "--model", "random-dense", "--tiny", "--repeats", "1", "--out", str(made))
    assert done.returncode == 0, done.stdout + done.stderr
    (ours,) = json.loads((made / "step.json").read_text())["sides"]
    (run,) = ours["runs"]
    assert run["trained_tokens"] == run["answer_tokens"] == 4 * 2 * 4
    assert run["seconds"] == pytest.approx(sum(run["phases"].values()))


def test_verdicts_of_the_page(tmp_path: Path) -> None:
    rows = (
        row_file(),
        row_file(row="step-natural", ratio=5.9),
        row_file(row="step-4-updates", ratio=2.99, profile="aten::mm"),
        row_file(row="logprob-memory", must=0.2, aim=0.1, better="less", field="share", ratio=0.1, best=None),
        row_file(row="update-ceiling", must=0.3, aim=0.45, field="share", ratio=0.29, best=None),
    )
    (tmp_path / "step-4-updates.md").write_text("The optimizer is slow.")
    page = write_page(tmp_path, *rows)
    verdicts = {name: line_of(page, name)[-1] for name in ROWS if f"| [{name}]" in page}
    assert verdicts == {
        "step": "aim",
        "step-natural": "met",
        "step-4-updates": "**miss**",
        "update-ceiling": "**miss**",
        "logprob-memory": "aim",
    }
    assert "The optimizer is slow." in page
    assert "aten::mm" in page
    assert line_of(page, "step")[3:6] == ["2 s a step", "13 s a step", "6.50x"]
    assert "Not measured: step-long, rollout-hf" in page


def test_the_second_ratio_of_a_row_can_miss_it(tmp_path: Path) -> None:
    also = [dict(row="step-long", ours=6.0, theirs=17.8, ratio=0.337, must=0.3, verdict="miss")]
    memory = row_file(row="memory", must=0.65, aim=None, better="less", field="rss_gb", unit="GB", ratio=0.5, also=also)
    page = write_page(tmp_path, memory)
    assert line_of(page, "memory")[-1] == "**miss**"
    assert "| 6.00 GB | 17.80 GB | 0.34 | 0.3 | – | **miss** |" in page


def test_the_best_peer_that_counts_is_the_one_compared_with() -> None:
    program = (
        "import sys; sys.path.insert(0, 'benchmarks'); import race, rows; "
        "side = lambda name, median, counts=True: dict(name=name, median=median, counts=counts); "
        "sides = [side('gspo', 4.0), side('a', 20.0), side('b', 12.0), side('c', 8.0, False)]; "
        "print(*race.compare(rows.ROWS['step'], sides)); "
        "print(*race.compare(rows.ROWS['rollout-hf'], [side('gspo', 40.0), *sides[1:]]))"
    )
    done = command("-c", program)
    assert done.stdout.split() == ["b", "3.0", "a", "2.0"], done.stderr
