"""Whole runs of PPO: what they leave, that they go on exactly after a kill, and that the reward rises."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import gspo
from gspo import cli
from gspo.algorithms.values import next_kl_coefficient
from processes import KILLED_WHILE_JUDGING

Line = dict[str, Any]

SHORT: dict[str, Any] = {
    "algorithm": "ppo",
    "steps": 5,
    "prompts_per_step": 4,
    "group_size": 4,
    "threads": 1,
    "judging.workers": 1,
    "eval.every": 0,
    "checkpoint.every": 2,
    "optimizer.learning_rate": 3e-3,
    "model.dtype": "float32",
}
KL: dict[str, Any] = {
    "algorithm.kl_coefficient": 0.2,
    "algorithm.kl_in": "reward",
    "algorithm.kl_estimator": "k1",
    "critic.kl_target": 0.05,
}


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def tiny(folder: Path, **keys: Any) -> Path:
    return gspo.train("tiny", dir=folder, reward=digits, **{**SHORT, **keys}).folder


def journal(folder: Path) -> list[Line]:
    return [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]


def without_time(lines: list[Line]) -> list[Line]:
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def same_tensors(one: Path, other: Path) -> bool:
    a, b = load_file(one), load_file(other)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize(
    "keys",
    [
        KL,
        {"critic.backbone": "shared", "group_size": 1, "prompts_per_step": 8, "model.dtype": "bfloat16"},
        {"model.name": "random-moe", "algorithm.epochs": 2, "algorithm.routing": "old", "critic.learning_rate": 1e-3},
    ],
    ids=["kl-steered", "shared-bfloat16", "moe-epochs"],
)
def test_a_killed_run_goes_on_bit_for_bit(keys: dict[str, Any], tmp_path: Path) -> None:
    cut, answers = tmp_path / "cut", 4 * 4 if "group_size" not in keys else 8
    words = [sys.executable, "-c", KILLED_WHILE_JUDGING, str(cut), str(answers * 3 + 5), json.dumps({**SHORT, **keys})]
    done = subprocess.run(words, capture_output=True, timeout=120, env={**os.environ}, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert 2 <= journal(cut)[-1]["step"] < 5
    whole = tiny(tmp_path / "whole", **keys)
    gspo.train(resume=cut, reward=digits)
    assert without_time(journal(cut)) == without_time(journal(whole))
    files = ("model.safetensors", "optimizer.safetensors", "critic.safetensors", "critic-optimizer.safetensors")
    for name in files:
        assert same_tensors(*(folder / "checkpoints" / "00000005" / name for folder in (whole, cut))), name
    states = [json.loads((f / "checkpoints" / "00000005" / "state.json").read_text()) for f in (whole, cut)]
    assert states[0] == states[1]
    assert (states[0]["kl_coefficient"] is not None) == ("critic.kl_target" in keys)


def test_what_a_run_says_of_its_critic(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny(tmp_path / "run", steps=3, **KL, **{"algorithm.updates_per_step": 1})
    lines = journal(folder)
    first, last = lines[0], lines[-1]
    assert first["value/mean"] == 0.0, "a critic starts by knowing nothing"
    assert abs(first["kl/mean"]) < 1e-6, "the policy is its reference at the start"
    assert abs(first["kl/answer"]) < 1e-6
    assert last["kl/answer"] != 0
    assert first["value/explained_variance"] == pytest.approx(0, abs=1e-6)
    assert first["value/outcome"] == pytest.approx(first["reward/mean"], abs=0.05)
    assert [line["kl/coefficient"] for line in lines[:2]] == [0.2, pytest.approx(0.2 * 0.98)], (
        "KL 0 is below the target"
    )
    assert last["value/mean"] != 0
    assert all(line["value/loss"] > 0 and 0 <= line["value/clipped"] <= 1 for line in lines)
    assert first["value/learning_rate"] == pytest.approx(3e-2), "ten times that of the policy"
    assert first["verdict/kind"] in ("learning", "truncated")
    out = capsys.readouterr().out
    assert "critic random-dense" in out
    assert "critic explains" in out
    checkpoint = folder / "checkpoints" / "00000003"
    assert load_file(checkpoint / "critic.safetensors")["lm_head.weight"].shape == (1, 64)
    policy = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert policy.get_output_embeddings().out_features > 1, "what is exported is the policy alone"


def test_the_steered_coefficient_is_the_one_in_the_reward(tmp_path: Path) -> None:
    """At step 1 the KL is 0 and its coefficient no matter: step 2 is that of a run with the steered one from the start."""
    fixed = {key: value for key, value in KL.items() if key != "critic.kl_target"}
    second = next_kl_coefficient(0.2, [0.0], KL["critic.kl_target"])
    runs = {"steered": KL, "same": {**fixed, "algorithm.kl_coefficient": second}, "other": fixed}
    outcome = {name: journal(tiny(tmp_path / name, steps=2, **keys))[1]["value/outcome"] for name, keys in runs.items()}
    assert outcome["steered"] == pytest.approx(outcome["same"], abs=1e-7)
    assert abs(outcome["steered"] - outcome["other"]) > 1e-5


def test_runs_without_a_critic_keep_nothing_of_one(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", algorithm="grpo", steps=1)
    assert not list((folder / "checkpoints" / "00000001").glob("critic*"))
    assert journal(folder)[0]["value/loss"] is None


def test_a_checkpoint_that_lost_its_critic_is_refused(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=2)
    (folder / "checkpoints" / "00000002" / "critic.safetensors").unlink()
    with pytest.raises(gspo.InputError, match=r"critic\.safetensors"):
        gspo.train(resume=folder, reward=digits, steps=3)


def test_a_critic_of_another_vocabulary_is_refused_before_a_run_exists(tmp_path: Path) -> None:
    checkpoint = tiny(tmp_path / "other", steps=1) / "checkpoints" / "00000001"
    config = json.loads((checkpoint / "tokenizer.json").read_text())
    vocabulary = config["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (checkpoint / "tokenizer.json").write_text(json.dumps(config))
    with pytest.raises(gspo.InputError, match=r"critic\.model=.* has another vocabulary than model=random-dense"):
        tiny(tmp_path / "run", **{"critic.model": str(checkpoint)})
    assert not (tmp_path / "run").exists()


def test_a_critic_of_another_size_than_the_policy(tmp_path: Path) -> None:
    folder = tiny(tmp_path / "run", steps=2, **{"critic.model": "tiny-dense"})
    assert journal(folder)[-1]["value/mean"] != 0


LEARNING: dict[str, Any] = {"steps": 12, "prompts_per_step": 8, "checkpoint.every": 0}


@pytest.mark.parametrize(
    "critic", [{"critic.backbone": "separate", "critic.learning_rate": 3e-3}, {"critic.backbone": "shared"}], ids=str
)
def test_the_reward_rises_and_the_values_follow(critic: dict[str, Any], tmp_path: Path) -> None:
    for seed in (0, 1):
        folder = tiny(tmp_path / f"seed-{seed}", seed=seed, **LEARNING, **critic)
        lines = journal(folder)
        rewards = [line["reward/mean"] for line in lines]
        assert fmean(rewards[-3:]) - fmean(rewards[:3]) > 0.25, rewards
        assert lines[0]["value/mean"] == 0.0
        assert lines[-1]["value/mean"] == pytest.approx(lines[-1]["value/outcome"], abs=0.3)


def test_one_answer_a_prompt_is_enough(tmp_path: Path) -> None:
    keys = {**LEARNING, "group_size": 1, "prompts_per_step": 32, "critic.learning_rate": 3e-3}
    folder = tiny(tmp_path / "run", **keys)
    lines = journal(folder)
    rewards = [line["reward/mean"] for line in lines]
    assert fmean(rewards[-3:]) - fmean(rewards[:3]) > 0.15, rewards
    assert {line["verdict/kind"] for line in lines} <= {"learning", "truncated"}


def test_out_of_memory_in_the_critic_repeats_no_update_of_the_policy(tmp_path: Path) -> None:
    from gspo import settings
    from gspo.build import build
    from gspo.errors import OutOfMemoryError
    from gspo.loop import train as loop

    def run(folder: str, fail: bool) -> Path:
        keys = {**SHORT, "steps": 1, "dir": tmp_path / folder, "reward": "regex:[0-9]"}
        job = build(settings.load("tiny", [f"{key}={value}" for key, value in keys.items()]))
        assert job.critic is not None
        own = job.critic.own
        assert own is not None
        right, calls = own.update, []

        def exhausted(*arguments: Any) -> Any:
            calls.append(arguments)
            if fail and len(calls) == 2:
                raise OutOfMemoryError("none left")
            return right(*arguments)

        own.update = exhausted  # type: ignore[method-assign]
        return loop(job).folder

    whole, cut = run("whole", False), run("cut", True)
    assert journal(cut)[0]["updates/done"] == journal(whole)[0]["updates/done"] == 4
    assert same_tensors(*(f / "checkpoints" / "00000001" / "model.safetensors" for f in (whole, cut)))


def test_the_command_line_says_where_a_critic_belongs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["train", "tiny", f"dir={tmp_path / 'run'}", "critic.gamma=0.9"]
    assert cli.guarded(lambda: cli.app(words)) == 2
    assert "critic: has no effect with algorithm=gspo" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
