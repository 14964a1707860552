"""The guard at work in whole runs: what it puts back, what goes on, how it ends, and that it resumes exactly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gspo

SHORT: dict[str, Any] = dict(
    model={"name": "random-dense", "dtype": "float32"},
    prompts_per_step=4,
    group_size=4,
    threads=1,
    sampling={"max_new_tokens": 4},
    eval={"every": 0},
    judging={"workers": 1},
)
FELL = range(12, 16)
"""Steps whose rewards fall, whatever is answered: the alarm comes at the fourth, for the guard waits that long. By then the
first checkpoint is known to be good, and a later one is not."""


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def falling(folder: Path) -> Any:
    """Digits, until the journal shows that the steps of `FELL` are being done."""

    def reward(completion: str) -> float:
        journal = folder / "journal.jsonl"
        done = len(journal.read_text().splitlines()) if journal.exists() else 0
        return digits(completion) - 5.0 * (done + 1 in FELL)

    return reward


def run(folder: Path, **keys: Any) -> Path:
    return gspo.train("tiny", dir=str(folder), **{**SHORT, **keys}).folder


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return load_file(folder / "checkpoints" / f"{step:08d}" / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.fixture(scope="module")
def repaired(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 18 steps that was rolled back after step 15, every checkpoint kept."""
    folder = tmp_path_factory.mktemp("guard") / "run"
    optimizer = {"learning_rate": 3e-3, "schedule": "linear"}
    return run(folder, reward=falling(folder), steps=18, checkpoint={"every": 1, "keep": 20}, optimizer=optimizer)


def test_weights_and_optimizer_return_and_time_goes_on(repaired: Path) -> None:
    lines = journal(repaired)
    assert [line["step"] for line in lines] == list(range(1, 19)), "steps go on"
    assert [line["version"] for line in lines] == list(range(1, 19)), "versions go on"
    actions = {line["step"]: line["guard/action"] for line in lines if line["guard/action"] != "none"}
    assert actions == {13: "warn", 15: "rollback"}
    back = lines[14]
    assert (back["guard/rule"], back["guard/target"], back["guard/rollbacks"], back["guard/step_size"]) == (
        "reward", 1, 1, 0.5,
    )  # fmt: skip
    assert same(weights(repaired, 15), weights(repaired, 1))
    moments = [load_file(repaired / "checkpoints" / f"{s:08d}" / "optimizer.safetensors") for s in (15, 1, 14)]
    assert same(moments[0], moments[1])
    assert not same(moments[0], moments[2])
    states = [json.loads(path.read_text()) for path in sorted(repaired.glob("checkpoints/*/state.json"))]
    assert [state["position"] for state in states] == [4 * step for step in range(1, 19)], "the sampler goes on"
    # The schedule counts updates and goes on; the factor is half.
    full = [3e-3 * (1 - (state["updates"] - 1) / 72) for state in states]
    assert [line["learning_rate"] for line in lines] == pytest.approx(full[:15] + [rate / 2 for rate in full[15:]])


def test_the_report_says_what_the_guard_did(repaired: Path) -> None:
    html = (repaired / "report.html").read_text()
    rows = [
        re.findall(r"<td>(.*?)</td>", row) for row in re.findall(r"<tr>(<td>.*?)</tr>", html.split("<h2>Guard</h2>")[1])
    ]
    assert [row[:4] for row in rows[:2]] == [["13", "warn", "–", "1"], ["15", "rollback", "1", "0.5"]]
    assert rows[1][4].startswith("reward: the reward, ")


def test_what_is_restored_is_said(repaired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cut = tmp_path / "run"
    shutil.copytree(repaired, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000018")
    gspo.train(resume=cut, reward=falling(cut))
    said = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("resumed from "))
    updates = json.loads((cut / "checkpoints" / "00000017" / "state.json").read_text())["updates"]
    assert said.endswith(
        f"checkpoints/00000017: weights, optimizer ({updates} updates), position 68 in the data, the guard (1 rollbacks, learning rate times 0.5)"
    )


@pytest.mark.parametrize("killed_after", [5, 13, 15, 16])
def test_a_run_killed_around_a_rollback_resumes_bit_for_bit(repaired: Path, killed_after: int, tmp_path: Path) -> None:
    cut = tmp_path / "run"
    shutil.copytree(repaired, cut, symlinks=True)
    for late in range(killed_after + 1, 19):
        shutil.rmtree(cut / "checkpoints" / f"{late:08d}")
    gspo.train(resume=cut, reward=falling(cut))
    assert journal(cut) == journal(repaired)
    assert same(weights(cut, 18), weights(repaired, 18))


def test_the_target_is_kept_however_few_checkpoints_are(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run", reward=falling(tmp_path / "run"), steps=16, checkpoint={"every": 1, "keep": 1},
        optimizer={"learning_rate": 3e-3},
    )  # fmt: skip
    assert journal(folder)[14]["guard/target"] == 1
    assert journal(folder)[14]["guard/action"] == "rollback"


def test_a_damaged_target_is_named_and_the_run_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def reward(completion: str) -> float:
        if (folder / "checkpoints" / "00000014").exists():
            (folder / "checkpoints" / "00000001" / "model.safetensors").write_bytes(b"")
        return falling(folder)(completion)

    with pytest.raises(gspo.RunError, match=r"the guard cannot roll back: .*00000001.*model\.safetensors is damaged"):
        run(folder, reward=reward, steps=16, checkpoint={"every": 1, "keep": 1}, optimizer={"learning_rate": 3e-3})


def test_answers_of_the_weights_that_have_gone_are_dropped(tmp_path: Path) -> None:
    """With max_staleness the next step's answers are there already when the weights are put back."""
    folder = run(
        tmp_path / "run", reward=falling(tmp_path / "run"), steps=19, checkpoint={"every": 1, "keep": 1},
        optimizer={"learning_rate": 3e-3}, max_staleness=1,
    )  # fmt: skip
    lines = journal(folder)
    back = next(line["step"] for line in lines if line["guard/action"] == "rollback")
    ages = {line["step"]: line["staleness/max"] for line in lines}
    assert (ages[back], ages[back + 1], ages[back + 2]) == (1, 0, 1)


def test_without_a_checkpoint_it_goes_back_to_the_start(tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run", reward=falling(tmp_path / "run"), steps=15, checkpoint={"every": 0}, optimizer={"learning_rate": 3e-3}
    )  # fmt: skip
    fresh = run(tmp_path / "fresh", reward=lambda completion: 1.0, steps=1)
    assert journal(folder)[14]["guard/target"] == 0
    assert same(weights(folder, 15), weights(fresh, 1))


@pytest.mark.parametrize(("mode", "said"), [("warn", ["warn", "warn"]), ("off", [])])
def test_it_only_warns_or_is_silent_when_told_so(mode: str, said: list[str], tmp_path: Path) -> None:
    folder = run(
        tmp_path / "run", reward=falling(tmp_path / "run"), steps=16, guard=mode, checkpoint={"every": 1, "keep": 1}
    )
    found = [line.get("guard/action") for line in journal(folder)]
    assert [action for action in found if action not in (None, "none")] == said
    assert {line["learning_rate"] for line in journal(folder)} == {3e-3}
    assert len(list(folder.glob("checkpoints/*"))) == 1, "none is kept to go back to"


# ------------------------------------------------------------------------------ numbers that are not finite

HUGE: dict[str, Any] = dict(optimizer={"learning_rate": 1e38}, reward=digits, checkpoint={"every": 1, "keep": 9})


def test_weights_that_overflow_are_put_back_three_times_and_then_it_ends(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(gspo.RunError, match=r"guard stopped the run .* 3 rollbacks had not mended it: .*not finite"):
        run(folder, steps=9, **HUGE)
    lines = journal(folder)
    assert [line["guard/action"] for line in lines] == ["rollback", "rollback", "rollback", "stop"]
    assert {line["guard/rule"] for line in lines} == {"non-finite"}
    fresh = run(tmp_path / "fresh", reward=lambda completion: 1.0, steps=1)
    assert same(weights(folder, lines[-1]["step"]), weights(fresh, 1)), "what is saved can be gone on with"


def test_without_the_guard_they_end_the_run(tmp_path: Path) -> None:
    with pytest.raises(gspo.RunError, match="not finite"):
        run(tmp_path / "run", steps=3, guard="off", **HUGE)


# ------------------------------------------------------------------------------ the end before the last step


def test_a_run_that_no_longer_improves_ends_early(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    values = iter([0.1, 0.1, 0.5, 0.4, 0.4, 0.4])  # the trial; before training; then one an evaluation
    folder = tmp_path / "run"
    result = gspo.train(
        "tiny", dir=str(folder),
        **{**SHORT, "steps": 9, "guard": "warn", "reward": lambda completion: digits(completion),
           "eval": {"every": 1, "limit": 1, "patience": 2, "reward": lambda completion: next(values)}},
    )  # fmt: skip
    assert (result.step, result.best_reward) == (3, 0.5)
    assert result.ended == "no better for 2 evaluations than 0.500, after step 1"
    assert (folder / "checkpoints" / "00000003").is_dir()


def test_a_run_that_is_solved_ends_early(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    keys = {
        **SHORT,
        "steps": 9,
        "reward": digits,
        "eval": {"every": 2, "patience": 5, "reward": lambda completion: 1.0},
    }
    result = gspo.train("tiny", dir=str(folder), **keys)
    assert (result.step, result.ended) == (2, "solved: the held-out reward is 1.000")


def test_patience_needs_something_to_measure(tmp_path: Path) -> None:
    with pytest.raises(gspo.InputError, match=r"eval\.every=0"):
        run(tmp_path / "run", eval={"every": 0, "patience": 2})
    with pytest.raises(gspo.InputError, match="no held-out prompts"):
        run(tmp_path / "run", data=[{"prompt": "a"}], reward=digits, eval={"every": 1, "patience": 2})
