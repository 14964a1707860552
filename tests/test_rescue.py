"""The guard at work in whole runs: what it puts back, what goes on, how it ends, and that it resumes exactly."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import gspo
from gspo.seal import seal

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


def resumed(
    repaired: Path, folder: Path, *, after: int, without: list[int], damaged: int | None = None
) -> list[dict[str, Any]]:
    """The run cut off after a step, gone on with from there, with checkpoints removed and one damaged."""
    shutil.copytree(repaired, folder, symlinks=True)
    for step in [*without, *range(after + 1, 19)]:
        shutil.rmtree(folder / "checkpoints" / f"{step:08d}")
    if damaged is not None:
        (folder / "checkpoints" / f"{damaged:08d}" / "model.safetensors").write_bytes(b"")
    gspo.train(resume=folder, reward=falling(folder))
    return journal(folder)


def test_a_damaged_target_is_said_and_the_guard_goes_back_to_the_start(
    repaired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = resumed(repaired, tmp_path / "run", after=13, without=[], damaged=1)
    assert [(x["step"], x["guard/target"]) for x in lines if x["guard/action"] == "rollback"] == [(15, 0)]
    said = [line for line in capsys.readouterr().out.splitlines() if "cannot go back" in line]
    assert len(said) == 1
    assert re.fullmatch(
        r"warning: the guard cannot go back to checkpoint 1: .*00000001/model\.safetensors is damaged .* At an alarm it goes back to the start",
        said[0],
    )
    fresh = run(tmp_path / "fresh", reward=lambda completion: 1.0, steps=1)
    assert same(weights(tmp_path / "run", 15), weights(fresh, 1))
    assert load_file(tmp_path / "run" / "checkpoints" / "00000015" / "optimizer.safetensors") == {}


def test_a_target_that_is_missing_is_said_and_forgotten_at_resume(
    repaired: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one that waits to be one, with it."""
    lines = resumed(repaired, tmp_path / "run", after=11, without=[1])
    out = capsys.readouterr().out
    said = "warning: the guard cannot go back to checkpoint 1: it is not there. At an alarm it goes back to the start"
    assert out.count("cannot go back") == 1
    assert said in out
    assert out.index(said) < out.index("step 12"), "at once, not at the alarm"
    assert [(x["step"], x["guard/target"]) for x in lines if x["guard/action"] == "rollback"] == [(15, 0)]
    waiting = resumed(repaired, tmp_path / "waiting", after=6, without=[1])
    assert [(x["step"], x["guard/target"]) for x in waiting if x["guard/action"] == "rollback"] == [(15, 0)]
    assert "cannot go back" not in capsys.readouterr().out, "it was none yet"


def test_another_good_checkpoint_is_gone_back_to_before_the_start(repaired: Path, tmp_path: Path) -> None:
    """The newest of those that were targets and are there and whole."""
    cut, last = tmp_path / "cut", tmp_path / "cut" / "checkpoints" / "00000013"
    shutil.copytree(repaired, cut, symlinks=True)
    state = json.loads((last / "state.json").read_text())
    state["guard"]["target"] = 5  # where the ones before it name 1
    (last / "state.json").write_text(json.dumps(state))
    (last / "checksums.json").unlink()
    seal(last)
    lines = resumed(cut, tmp_path / "run", after=13, without=[], damaged=5)
    assert [(x["step"], x["guard/target"]) for x in lines if x["guard/action"] == "rollback"] == [(15, 1)]
    assert same(weights(tmp_path / "run", 15), weights(repaired, 1))
    missing = resumed(cut, tmp_path / "missing", after=13, without=[5])
    assert missing == lines


def test_a_policy_that_stays_dead_after_a_rollback_is_seen_again(tmp_path: Path) -> None:
    """Back to weights from before the guard had an average to compare with: it has one from the first steps of the run."""
    folder = tmp_path / "run"

    def reward(completion: str) -> float:
        journal = folder / "journal.jsonl"
        done = len(journal.read_text().splitlines()) if journal.exists() else 0
        return digits(completion) if done < 11 else -5.0

    run(folder, reward=reward, steps=24, checkpoint={"every": 0}, optimizer={"learning_rate": 1e-3})
    back = [(x["step"], x["guard/target"]) for x in journal(folder) if x["guard/action"] == "rollback"]
    assert back == [(15, 0), (22, 0)]


def test_a_step_whose_weights_were_put_back_is_not_blamed_on_its_learning_rate(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(gspo.RunError, match="guard stopped the run"):
        run(folder, steps=9, **HUGE)
    for line in journal(folder):
        assert line["verdict/kind"] == "put_back"
        assert line["verdict"].startswith("the guard puts the weights back (rule non-finite); ")


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


CRITIC: dict[str, Any] = {"algorithm": "ppo"}
"""With a critic of its own."""


@pytest.fixture(scope="module", params=[{}, CRITIC], ids=["policy", "critic"])
def restarted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of 18 steps that was rolled back to the start after step 15; and it, ended by then."""
    folder = tmp_path_factory.mktemp("start") / "run"
    keys = {**request.param, "optimizer": {"learning_rate": 3e-3, "schedule": "linear"}}
    run(folder, reward=falling(folder), steps=18, checkpoint={"every": 15, "keep": 9}, **keys)
    assert [(x["step"], x["guard/target"]) for x in journal(folder) if x["guard/action"] == "rollback"] == [(15, 0)]
    cut = folder.with_name("cut")
    shutil.copytree(folder, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000018")
    return folder, cut


def test_a_checkpoint_after_a_rollback_to_the_start_resumes_bit_for_bit(
    restarted: tuple[Path, Path], tmp_path: Path
) -> None:
    """Its optimizer holds nothing, though updates were made."""
    whole, cut = restarted[0], tmp_path / "run"
    shutil.copytree(restarted[1], cut, symlinks=True)
    gspo.train(resume=cut, reward=falling(cut))
    assert journal(cut) == journal(whole)
    for file in (whole / "checkpoints" / "00000018").glob("*.safetensors"):
        assert same(load_file(cut / "checkpoints" / "00000018" / file.name), load_file(file)), file.name


@pytest.mark.parametrize("lost", ["", "exp_avg_sq.", "step.model.embed_tokens.weight"])
def test_an_optimizer_that_lost_its_state_is_still_refused(lost: str, repaired: Path, tmp_path: Path) -> None:
    """All of it, a slot, a weight's."""
    cut = tmp_path / "run"
    shutil.copytree(repaired, cut, symlinks=True)
    checkpoint = cut / "checkpoints" / "00000018"
    kept = load_file(checkpoint / "optimizer.safetensors")
    save_file({k: v for k, v in kept.items() if not k.startswith(lost)}, checkpoint / "optimizer.safetensors")
    (checkpoint / "checksums.json").unlink()
    seal(checkpoint)
    with pytest.raises(
        gspo.RunError, match=r"no optimizer state for .* weights, model\.embed_tokens\.weight among them"
    ):
        gspo.train(resume=cut, reward=falling(cut), steps=19)


def test_a_run_that_the_guard_stopped_is_gone_on_with(tmp_path: Path) -> None:
    """By diverging in its updates, of policy and critic, thrice; each time back to the start."""
    folder = tmp_path / "run"
    with pytest.raises(gspo.RunError, match="guard stopped the run"):
        run(folder, steps=8, **{**HUGE, **CRITIC})
    done = journal(folder)[-1]["step"]
    state = json.loads((folder / "checkpoints" / f"{done:08d}" / "state.json").read_text())
    assert state["emptied"]
    assert state["critic_updates"] < state["updates"], (
        "in a step in which the policy diverges the critic learns nothing"
    )
    with pytest.raises(gspo.RunError, match=f"guard stopped the run after step {done + 1}"):
        gspo.train(resume=folder, reward=digits)
    after = json.loads((folder / "checkpoints" / f"{done + 1:08d}" / "state.json").read_text())
    assert after["critic_updates"] == state["critic_updates"]


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
