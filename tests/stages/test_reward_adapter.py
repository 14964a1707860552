"""A reward model that is an adapter: peft's own gradient, a score trained whole beside it, and folders that others load."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from scoring import PAIRS, batch_of, by_hand, gradients, journal, made
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

import norms
from gspo import config, rates, settings
from gspo.errors import InputError
from gspo.export import export
from gspo.models import lora
from gspo.models.load import load_policy
from gspo.models.scorer import load_scorer
from gspo.place import resumed_run
from gspo.rewards.classifier import load_classifier
from gspo.stage_config import RewardRun
from gspo.stages.reward_build import build
from gspo.stages.reward_model import RewardJob
from gspo.stages.stage import tune

Command = Callable[..., tuple[int, str, str]]


def base(folder: Path, name: str = "random-dense") -> str:
    """A language model in a folder, which transformers and peft can find."""
    policy = load_policy(config.Model(name=name, dtype="float32"))
    policy.model.save_pretrained(folder)
    policy.tokenizer.chat_template = None
    policy.tokenizer.save_pretrained(folder)
    return str(folder)


def adapted(folder: Path, name: str = "random-dense", **keys: Any) -> RewardJob:
    """A job in float64 whose adapter and score have been trained a little."""
    job = made(folder / "run", model={"name": base(folder / "base", name), "lora": 4}, **keys)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for key, p in job.policy.model.named_parameters():
            if ".lora_B." in key:
                p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p))
    return job


def saved(job: RewardJob, folder: Path) -> Path:
    adapter = lora.adapter_of(job.policy.model)
    assert adapter is not None
    folder.mkdir()
    adapter.save(folder, job.policy.model.state_dict())
    job.policy.tokenizer.save_pretrained(folder)
    return folder


def by_peft(job: RewardJob, folder: Path) -> Any:
    """The adapter in `folder`, on an untouched classifier of transformers, by peft alone."""
    from peft import PeftModel

    plain = AutoModelForSequenceClassification.from_pretrained(job.run.model.name, num_labels=1, dtype=torch.float64)
    if hasattr(plain.config, "num_experts"):
        plain.set_experts_implementation("eager")  # the grouped product has no float64
    model = PeftModel.from_pretrained(plain.eval(), str(folder), is_trainable=True, autocast_adapter_dtype=False).eval()
    norms.in_float64(model)
    return model


def named_as_ours(gradient: dict[str, Tensor]) -> dict[str, Tensor]:
    return {
        key.removeprefix("base_model.model.").replace(".modules_to_save.default", ""): g for key, g in gradient.items()
    }


# transformers takes a router's softmax in float32 whatever the model's type.
@pytest.mark.parametrize(("name", "rounding"), [("random-dense", 1e-12), ("random-moe", 1e-7)])
def test_loss_and_gradient_are_pefts_own_one_sequence_at_a_time(name: str, rounding: float, tmp_path: Path) -> None:
    job = adapted(tmp_path, name, data={"margin": "gap"}, centring=0.03)
    loss, found = gradients(job, *batch_of(job, 40))
    expected, gradient = by_hand(job, PAIRS, "gap", by_peft(job, saved(job, tmp_path / "adapter")))
    own = named_as_ours(gradient)
    assert loss == pytest.approx(expected, rel=1e3 * rounding)
    assert found.keys() == own.keys()
    assert "score.weight" in found
    assert all(".lora_" in key for key in found if key != "score.weight")
    for key in found:
        torch.testing.assert_close(found[key], own[key], rtol=1e3 * rounding, atol=rounding, msg=key)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_first_update_moves_the_score_then_b_then_a(dtype: str, tmp_path: Path) -> None:
    """A score of zero lets no gradient through, and B at zero none to A: neither is the sign of a dead run."""
    run = {"model": {"name": "random-dense", "dtype": dtype, "lora": 4}, "optimizer": {"learning_rate": 1e-2}}
    job = made(tmp_path / "run", steps=3, **run)
    start = {name: p.detach().clone() for name, p in job.learner.masters.items()}

    def moved() -> set[str]:
        stats, _ = job.update()
        assert stats.grad_norm > 0
        assert job.learner.change().changed > 0
        return {part_of(name) for name, p in job.learner.masters.items() if not torch.equal(p, start[name])}

    assert [moved(), moved(), moved()] == [{"score"}, {"score", "B"}, {"score", "B", "A"}]
    frozen = [name for name, p in job.policy.model.named_parameters() if not p.requires_grad]
    assert len(frozen) > 10
    assert not job.learner.masters.keys() & set(frozen)


def part_of(name: str) -> str:
    return "score" if name == "score.weight" else name.split(".lora_")[1][0]


# ------------------------------------------------------------------------------ runs


def trained(folder: Path, name: str, dtype: str = "float32", **keys: Any) -> Path:
    """A run on preferences that can be learned."""
    tree = {
        "dir": str(folder),
        "threads": 1,
        "model": {"name": name, "dtype": dtype, "lora": 4},
        "data": {"source": "preferences:3", "limit": 128, "template": "none"},
        "batch_size": 16,
        "steps": 8,
        "optimizer": {"learning_rate": 1e-2, "schedule": "linear"},
        "checkpoint": {"every": 4, "keep": 3},
        "eval": {"every": 4, "limit": 64},
        **keys,
    }
    return tune(build(settings.check_as(RewardRun, tree, "test"))).folder


@pytest.mark.parametrize(("name", "dtype"), [("random-dense", "bfloat16"), ("random-moe", "float32")])
def test_a_resumed_run_is_the_run_that_was_not_interrupted(name: str, dtype: str, tmp_path: Path) -> None:
    whole = trained(tmp_path / "whole", name, dtype)
    cut = tmp_path / "cut"
    shutil.copytree(whole, cut, symlinks=True)
    shutil.rmtree(cut / "checkpoints" / "00000008")
    tune(build(resumed_run(RewardRun, cut, []), resume=cut))
    assert journal(cut) == journal(whole)
    for file in ("adapter_model.safetensors", "optimizer.safetensors"):
        a, b = (load_file(folder / "checkpoints" / "00000008" / file) for folder in (whole, cut))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a), file


@pytest.fixture(scope="module")
def learned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run on tiny-dense, long enough that its scores say something."""
    data = {"source": "preferences:3", "limit": 512, "template": "none"}
    place = tmp_path_factory.mktemp("learned") / "run"
    folder = trained(place, "tiny-dense", steps=24, data=data, eval={"every": 24, "limit": 128})
    assert journal(folder)[-1]["eval/accuracy"] > 0.6
    return folder


TEXTS = ["c a b\n\na b c", "c a b\n\nc b a", "b a\n\na b and some more"]


@torch.inference_mode()
def scores(model: Any, tokenizer: Any) -> list[float]:
    return [float(model(**tokenizer(text, return_tensors="pt")).logits) for text in TEXTS]


def test_a_checkpoint_is_the_adapter_and_its_score_and_everyone_reads_the_same_in_it(
    learned: Path, tmp_path: Path
) -> None:
    from peft import AutoPeftModelForSequenceClassification

    best = learned / "best"
    assert {path.name for path in best.glob("*.safetensors")} == {"adapter_model.safetensors", "optimizer.safetensors"}
    assert load_file(best / "adapter_model.safetensors")["base_model.model.score.weight"].any()
    ours = scores(*load_classifier(str(best), None, "reward"))
    assert len({round(score, 2) for score in ours}) == 3, "they say something"
    tokenizer = AutoTokenizer.from_pretrained(best)
    by_transformers = AutoModelForSequenceClassification.from_pretrained(best, num_labels=1).eval()
    by_peft_alone = AutoPeftModelForSequenceClassification.from_pretrained(best, num_labels=1).eval()
    export(learned, tmp_path / "merged", checkpoint="best")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged").eval()
    assert (merged.config.num_labels, merged.config.architectures) == (1, ["LlamaForSequenceClassification"])
    assert not list((tmp_path / "merged").glob("adapter*"))
    for model in (by_transformers, by_peft_alone, merged):
        assert scores(model, tokenizer) == pytest.approx(ours, abs=1e-4), type(model)
    export(learned, tmp_path / "alone", checkpoint="best", adapter=True)
    assert scores(*load_classifier(str(tmp_path / "alone"), None, "reward")) == ours


def test_a_policy_is_rewarded_by_it_and_another_run_goes_on_from_it(
    learned: Path, tmp_path: Path, command: Command
) -> None:
    words = [
        f"dir={tmp_path / 'rl'}",
        "model=random-dense",
        "data=preferences:3",
        "data.template=none",
        "data.limit=16",
    ]
    short = ["steps=1", "prompts_per_step=4", "group_size=4", "threads=1", "sampling.max_new_tokens=6", "eval.every=0"]
    code, out, err = command("train", "tiny", *words, *short, f"reward=reward_model:{learned / 'best'}")
    assert code == 0, out + err
    model, tokenizer = load_classifier(str(learned / "best"), None, "reward")
    with gzip.open(tmp_path / "rl" / "rollouts" / "00000001.jsonl.gz", "rt") as file:
        rows = [json.loads(line) for line in file][:4]
    for row in rows:
        with torch.inference_mode():
            ids = tokenizer(f"{row['columns']['prompt']}\n\n{row['text']}", return_tensors="pt")
            assert row["reward"] == pytest.approx(float(model(**ids).logits), abs=1e-4)
    words = [f"model.name={learned / 'best'}", f"dir={tmp_path / 'more'}", "steps=1", "centring=0", "eval.limit=128"]
    code, out, err = command("reward", "letters", *words, "data=preferences:3", "data.template=none", "data.limit=128")
    assert code == 0, out + err
    assert journal(tmp_path / "more")[0]["eval/start/loss"] == pytest.approx(
        journal(learned)[-1]["eval/loss"], abs=1e-5
    )


def test_a_policys_adapter_is_a_start_and_its_score_is_zero(tmp_path: Path) -> None:
    policy = load_policy(config.Model(name="random-dense", dtype="float32", lora=config.Lora(rank=4)), seed=3)
    adapter = lora.adapter_of(policy.model)
    assert adapter is not None
    with torch.no_grad():
        for name, p in policy.model.named_parameters():
            if ".lora_B." in name:
                p.fill_(0.02)
    (tmp_path / "policy").mkdir()
    adapter.save(tmp_path / "policy", policy.model.state_dict())
    scorer = load_scorer(config.Model(name=str(tmp_path / "policy"), dtype="float32"))
    state = scorer.model.state_dict()
    assert not state["score.weight"].any()
    own = {name: p for name, p in policy.model.state_dict().items() if ".lora_" in name}
    assert own
    assert all(torch.equal(state[name], p) for name, p in own.items())
    with pytest.raises(InputError, match="adapter of a language model, not of a sequence classifier"):
        load_classifier(str(tmp_path / "policy"), None, "reward")


def test_a_reward_models_adapter_is_no_policy(learned: Path, tmp_path: Path, command: Command) -> None:
    code, _, err = command("train", "tiny", f"model={learned / 'best'}", f"dir={tmp_path / 'run'}")
    assert code == 2
    assert "is the adapter of a reward model, which writes no text" in err
    assert not (tmp_path / "run").exists()


def test_the_learning_rate_of_the_stage_is_that_of_an_adapter(tmp_path: Path, capsys: Any) -> None:
    folder = trained(tmp_path / "run", "random-dense", steps=1, optimizer={}, eval={"every": 0})
    expected = rates.of_adapter(rates.PREFERENCES, 64)
    assert yaml.safe_load((folder / "run.yaml").read_text())["optimizer"]["learning_rate"] == expected
    out = capsys.readouterr().out
    assert f"optimizer.learning_rate={expected:g}, which is the adapter's default" in out
    assert "trained: the score and" in out
