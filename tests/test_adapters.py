"""Whole runs that train an adapter: what they leave, how they go on, that they learn, and what they say."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import gspo
from gspo import config, rates, settings
from gspo.build import evaluate_model
from gspo.errors import InputError
from gspo.models import lora
from gspo.models.load import load_policy
from gspo.stage_config import Sft
from gspo.stages.sft_build import build
from gspo.stages.stage import tune

SHORT: dict[str, Any] = dict(steps=6, prompts_per_step=4, group_size=4, threads=1)
FILES = ("adapter_model.safetensors", "optimizer.safetensors")


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def tiny(folder: Path, name: str = "random-dense", dtype: str = "float32", **keys: Any) -> Path:
    model = {"name": name, "dtype": dtype, "lora": keys.pop("lora", {"rank": 4})}
    return gspo.train("tiny", dir=str(folder), **{**SHORT, "reward": digits, "model": model, **keys}).folder


def lines(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in found]


def last(folder: Path) -> Path:
    return sorted((folder / "checkpoints").iterdir())[-1]


def require_equal(a: Path, b: Path) -> None:
    assert lines(a) == lines(b)
    for name in FILES:
        one, other = load_file(last(a) / name), load_file(last(b) / name)
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one), name


@pytest.mark.parametrize(("name", "dtype"), [("random-dense", "bfloat16"), ("random-moe", "float32")])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(name: str, dtype: str, tmp_path: Path) -> None:
    """With a KL term, so that the reference of the resumed run is that of the start."""
    keys: dict[str, Any] = dict(
        algorithm={"name": "grpo", "kl_coefficient": 0.05},
        optimizer={"learning_rate": 3e-2, "schedule": "linear", "warmup_updates": 3},
        checkpoint={"every": 2, "keep": 3},
        eval={"every": 3, "limit": 4},
    )
    whole = tiny(tmp_path / "whole", name, dtype, **keys)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000006")
    gspo.train(resume=cut, reward=digits)
    require_equal(whole, cut)
    assert lines(whole)[-1]["kl/mean"] > 0


def test_a_checkpoint_is_the_adapter_alone_and_a_start_for_the_next_run(tmp_path: Path) -> None:
    first = tiny(tmp_path / "first", optimizer={"learning_rate": 3e-2}, eval={"every": 3, "limit": 4})
    saved = sorted(p.name for p in last(first).iterdir() if p.suffix == ".safetensors")
    assert saved == sorted(FILES), "no weights of the base"
    assert (first / "best").resolve().name in ("00000003", "00000006")
    algorithm = {"name": "grpo", "kl_coefficient": 0.05}
    keys: dict[str, Any] = dict(algorithm=algorithm, checkpoint={"every": 2, "keep": 3}, eval={"every": 0})
    second = tiny(tmp_path / "second", str(last(first)), lora=None, steps=4, **keys)
    base, start, end = (lora.read(folder)[0] for folder in (last(first), last(first), last(second)))
    assert start.keys() == end.keys() == base.keys()
    assert any(not torch.equal(start[key], end[key]) for key in start)
    assert lines(second)[0]["kl/mean"] < lines(second)[-1]["kl/mean"]
    cut = tmp_path / "cut"
    shutil.copytree(second, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000004")
    gspo.train(resume=cut, reward=digits)
    require_equal(second, cut)


def test_evaluation_takes_an_adapters_folder(tmp_path: Path) -> None:
    folder = tiny(
        tmp_path / "run", optimizer={"learning_rate": 3e-2}, eval={"every": 6, "limit": 8}, reward="regex:^[0-9]"
    )
    words = [f"model.name={folder / 'best'}", "model.lora=null"]
    found = list(evaluate_model(settings.load(folder / "run.yaml", words)))
    assert f"avg@1: {lines(folder)[-1]['eval/reward']:.3f}" in "\n".join(found)


def test_the_reward_rises(tmp_path: Path) -> None:
    """On a model that has learned something: of a random one, whose output layer is not adapted, little can be made."""
    for seed in (0, 1):
        keys: dict[str, Any] = dict(
            algorithm="grpo", optimizer={"learning_rate": 1e-2}, eval={"every": 0}, group_size=8, prompts_per_step=8
        )
        folder = tiny(tmp_path / str(seed), "tiny-dense", seed=seed, steps=12, **keys)
        rewards = [line["reward/mean"] for line in lines(folder)]
        assert fmean(rewards[-3:]) - fmean(rewards[:3]) > 0.1, rewards


# ------------------------------------------------------------------------------ fine-tuning


def fine_tune(folder: Path, dtype: str = "float32", **keys: Any) -> Path:
    tree = {
        "dir": str(folder),
        "threads": 1,
        "model": {"name": "random-dense", "dtype": dtype, "lora": 4},
        "data": {"source": "sort:2", "limit": 64, "template": "none"},
        "batch_size": 8,
        "steps": 8,
        "optimizer": {"learning_rate": 2e-2, "schedule": "linear"},
        "checkpoint": {"every": 4, "keep": 3},
        "eval": {"every": 4, "limit": 8, "reward": "sorted"},
        "sampling": {"max_new_tokens": 12},
        **keys,
    }
    return tune(build(settings.check_as(Sft, tree, "test"))).folder


def test_fine_tuning_an_adapter_learns_and_resumes(tmp_path: Path) -> None:
    whole = fine_tune(tmp_path / "whole", "bfloat16")
    assert lines(whole)[-1]["eval/loss"] < 0.95 * lines(whole)[0]["eval/start/loss"]
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000008")
    from gspo.place import resumed_run

    tune(build(resumed_run(Sft, cut, []), resume=cut))
    require_equal(whole, cut)


# ------------------------------------------------------------------------------ what is said


def rate_of(folder: Path) -> float:
    rate: float = yaml.safe_load((folder / "run.yaml").read_text())["optimizer"]["learning_rate"]
    return rate


def test_the_learning_rate_of_an_adapter_is_said_and_written_down(tmp_path: Path, capsys: Any) -> None:
    keys: dict[str, Any] = dict(steps=1, eval={"every": 0}, sampling={"max_new_tokens": 2})
    folder = gspo.train(
        dir=str(tmp_path / "a"), data="addition:0-9", reward=digits, threads=1, prompts_per_step=4, group_size=4,
        model={"name": "random-dense", "lora": 4}, **keys,
    ).folder  # fmt: skip
    expected = rates.of_adapter(1e-6, 64)
    assert rate_of(folder) == expected
    said = capsys.readouterr().out
    assert f"optimizer.learning_rate={expected:g}, which is the adapter's default" in said
    assert "LoRA of rank 4" in said
    assert rate_of(
        fine_tune(tmp_path / "b", optimizer={}, steps=1, eval={"every": 0}, sampling={})
    ) == rates.of_adapter(2e-5, 64)
    capsys.readouterr()
    tiny(tmp_path / "c", optimizer={"learning_rate": 1e-6}, **keys)
    assert "1e-06 is set, and is low for an adapter" in capsys.readouterr().out


def test_a_base_that_has_changed_under_a_run_is_refused_on_resume(tmp_path: Path) -> None:
    policy = load_policy(config.Model(name="random-dense"))
    policy.model.save_pretrained(tmp_path / "base")
    policy.tokenizer.save_pretrained(tmp_path / "base")
    folder = tiny(tmp_path / "run", str(tmp_path / "base"), steps=2, eval={"every": 0})
    with torch.no_grad():
        policy.model.model.norm.weight.mul_(2)
    policy.model.save_pretrained(tmp_path / "base")
    with pytest.raises(InputError, match="trained on other weights"):
        gspo.train(resume=folder, reward=digits, steps=4)
