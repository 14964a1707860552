"""PPO with an adapter: the reference is the start, whatever it was; the critic is whole; runs go on bit for bit."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import gspo
from gspo import config, rates, settings
from gspo.critic import open_critic
from gspo.models import lora
from gspo.models.load import load_policy

SHORT: dict[str, Any] = {
    "algorithm": "ppo",
    "algorithm.kl_coefficient": 0.2,
    "algorithm.kl_in": "reward",
    "algorithm.kl_estimator": "k1",
    "steps": 2,
    "prompts_per_step": 4,
    "group_size": 4,
    "threads": 1,
    "eval.every": 0,
    "checkpoint.every": 2,
    "optimizer.learning_rate": 3e-2,
    "critic.backbone": "separate",
    "model.name": "random-dense",
    "model.dtype": "float32",
    "model.lora": 4,
}


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def tiny(folder: Path, **keys: Any) -> Path:
    return gspo.train("tiny", dir=folder, reward=digits, **{**SHORT, **keys}).folder


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that has been trained, and is another policy than its base."""
    folder = tiny(tmp_path_factory.mktemp("started") / "run") / "checkpoints" / "00000002"
    assert any(w.abs().max() > 1e-2 for key, w in lora.read(folder)[0].items() if ".lora_B" in key)
    return folder


@pytest.mark.parametrize(
    ("start", "backbone", "dtype"),
    [
        ("plain", "separate", "float32"),
        ("plain", "shared", "bfloat16"),
        ("fresh", "separate", "bfloat16"),
        ("fresh", "shared", "float32"),
        ("adapter", "separate", "float32"),
        ("adapter", "shared", "bfloat16"),
    ],
)
def test_the_kl_from_the_start_is_zero_at_step_0_and_the_first_update_moves_weights(
    start: str, backbone: str, dtype: str, started: Path, tmp_path: Path
) -> None:
    model = {
        "plain": {"model.lora": None, "optimizer.learning_rate": 3e-3},
        "fresh": {},
        "adapter": {"model.name": str(started), "model.lora": None},
    }
    keys = {"critic.backbone": backbone, "model.dtype": dtype, "algorithm.updates_per_step": 1}
    first, second = journal(tiny(tmp_path / "run", **model[start], **keys))
    assert abs(first["kl/mean"]) < 1e-6
    assert abs(first["kl/answer"]) < 1e-6
    assert first["weights/changed"] > 0.3, "of a fresh adapter, whose A has no gradient yet, half"
    assert abs(second["kl/answer"]) > 1e-6
    assert second["value/mean"] != 0


@pytest.mark.parametrize(
    "keys", [{"critic.backbone": "separate"}, {"critic.backbone": "shared", "model.dtype": "bfloat16"}], ids=str
)
def test_a_resumed_run_is_the_run_that_was_not_interrupted(keys: dict[str, Any], started: Path, tmp_path: Path) -> None:
    keys = {**keys, "model.name": str(started), "model.lora": None, "steps": 4, "critic.kl_target": 0.05}
    whole, cut = tiny(tmp_path / "whole", **keys), tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000004")
    gspo.train(resume=cut, reward=digits)
    assert journal(cut) == journal(whole)
    names = {path.name for path in (whole / "checkpoints" / "00000004").glob("*.safetensors")}
    assert names == {f"{name}.safetensors" for name in ("adapter_model", "optimizer", "critic", "critic-optimizer")}
    for name in names:
        a, b = (load_file(folder / "checkpoints" / "00000004" / name) for folder in (whole, cut))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), name


def test_a_separate_critic_is_whole_and_starts_from_what_the_policy_is(started: Path) -> None:
    """Not from the base under the policy's adapter; nor with the step size of an adapter, too much for all weights."""
    words = ["algorithm=ppo", f"model.name={started}", "model.dtype=float32", "optimizer.learning_rate=1e-2"]
    run = settings.load("tiny", words)
    policy = load_policy(run.model)
    critic = open_critic(run, policy, None)
    assert critic is not None
    assert critic.own is not None
    merged = dict(lora.named_weights(policy.model))
    own = dict(critic.own.model.named_parameters())
    base = dict(load_policy(config.Model(name="random-dense", dtype="float32")).model.named_parameters())
    name = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(own[name], merged[name])
    assert not torch.equal(own[name], base[name])
    assert critic.own.masters.keys() == own.keys(), "each of its weights is trained"
    assert not [key for key in own if "lora" in key or "base_layer" in key]
    expected = rates.CRITIC * rates.of_all_weights(1e-2, 64)
    assert critic.own.settings.learning_rate == pytest.approx(expected)
    assert expected < 2e-2
