"""A checkpoint as others load it: the same log-probabilities, no file of ours, nothing written over."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

import gspo
from gspo import cli, config
from gspo.export import export, find
from gspo.models.attention import Packed
from gspo.models.heads import trained_logprobs
from gspo.models.load import load_policy
from gspo.seal import seal


def varied(completion: str) -> float:
    """Answers differ in it, whatever a model writes, so that the weights move."""
    return float(sum(map(ord, completion)) % 3)


KEYS: dict[str, Any] = dict(
    steps=2, prompts_per_step=4, group_size=4, threads=1, reward=varied, eval={"every": 1, "limit": 4},
    checkpoint={"every": 1, "keep": 2},
)  # fmt: skip


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    keys = {**KEYS, "data": "sort:4", "model": {"name": request.param, "dtype": "float32"}}
    return gspo.train("tiny", dir=tmp_path_factory.mktemp("export") / "run", **keys).folder


def ours(checkpoint: Path, ids: Tensor) -> Tensor:
    """Log-probabilities as the trainer computes them: packed, with its own attention and head."""
    policy = load_policy(config.Model(name=str(checkpoint), dtype="float32"))
    count = len(ids)
    with torch.no_grad():
        found, _ = trained_logprobs(
            policy.model,
            tokens_T=ids,
            position_T=torch.arange(count),
            layout=Packed([count], policy.model.device),
            source_N=torch.arange(count - 1),
            target_N=ids[1:],
            temperature=1.0,
        )
    return found


def theirs(folder: Path, ids: Tensor) -> Tensor:
    """The same by transformers alone, from the exported folder."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logprob = torch.log_softmax(model(ids[None]).logits[0].float(), -1)
    return logprob[:-1].gather(-1, ids[1:, None])[:, 0]


def test_an_exported_model_gives_the_trainers_log_probabilities(run: Path, tmp_path: Path) -> None:
    source = export(run, tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    ids = tokenizer("user: d b a c\nassistant: a b c d", return_tensors="pt").input_ids[0]
    assert len(ids) > 8
    assert source == run / "checkpoints" / "00000002"
    torch.testing.assert_close(theirs(tmp_path / "out", ids), ours(source, ids), rtol=0, atol=2e-5)
    begun = ours(run / "checkpoints" / "00000001", ids)
    assert (begun - ours(source, ids)).abs().max() > 1e-4, "the last step is another model than the one before"


def test_the_folder_has_what_others_need_and_nothing_of_ours(run: Path, tmp_path: Path) -> None:
    source = export(run, tmp_path / "out", dtype=torch.bfloat16)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json"} <= names
    assert not names & {"optimizer.safetensors", "state.json", "checksums.json", "settings.yaml"}
    for folder in (tmp_path / "out", source):
        modes = {path.name: path.stat().st_mode for path in folder.iterdir()}
        assert len(set(modes.values())) == 1, f"safetensors makes its files for their owner alone: {modes}"
    masters = load_file(source / "model.safetensors")
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == masters.keys()
    assert all(torch.equal(stored[key], masters[key].to(torch.bfloat16)) for key in masters)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:  # transformers asks for it
        assert file.metadata() == {"format": "pt"}
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16
    GenerationConfig.from_pretrained(tmp_path / "out").validate(strict=True)
    template = AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert template == AutoTokenizer.from_pretrained(source).chat_template


def test_an_adapter_is_merged_into_its_base(tmp_path: Path) -> None:
    keys: dict[str, Any] = {**KEYS, "model": {"name": "random-dense", "dtype": "float32", "lora": {"rank": 4}}}
    folder = gspo.train("tiny", dir=tmp_path / "run", **{**keys, "optimizer": {"learning_rate": 0.05}}).folder
    source = export(folder, tmp_path / "out")
    assert not list((tmp_path / "out").glob("*adapter*"))
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("what is 3 + 4?", return_tensors="pt").input_ids[0]
    torch.testing.assert_close(theirs(tmp_path / "out", ids), ours(source, ids), rtol=0, atol=2e-5)
    export(folder, tmp_path / "before", checkpoint="1", dtype=torch.bfloat16)
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "before", dtype="auto").dtype == torch.bfloat16
    assert (theirs(tmp_path / "before", ids) - theirs(tmp_path / "out", ids)).abs().max() > 1e-2, "the adapter is in it"


@pytest.mark.parametrize("critic", [{}, {"model": "random-moe"}])
def test_a_critic_stays_with_the_run(critic: dict[str, Any], tmp_path: Path) -> None:
    """An engine reads every *.safetensors of a folder."""
    folder = gspo.train("tiny", dir=tmp_path / "run", **{**KEYS, "algorithm": "ppo", "critic": critic}).folder
    source = export(folder, tmp_path / "out")
    assert (source / "critic.safetensors").is_file()
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors")] == ["model.safetensors"]


def test_experts_stand_under_the_names_of_checkpoints(run: Path, tmp_path: Path) -> None:
    """An engine that does not find an expert leaves it out without a word: verl-project/verl#6210."""
    export(run, tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        names = set(file.keys())
    assert not [name for name in names if "gate_up_proj" in name], "the fused name of transformers' own memory"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    experts = getattr(model.config, "num_experts", 0)
    assert sum(".experts." in name for name in names) == 3 * experts * model.config.num_hidden_layers


def test_nothing_is_written_over_and_what_is_missing_is_named(run: Path, tmp_path: Path) -> None:
    export(run, tmp_path / "out", checkpoint="1")
    kept = (tmp_path / "out" / "model.safetensors").read_bytes()
    with pytest.raises(gspo.InputError, match="exists already"):
        export(run, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == kept
    assert find(run, "best").name in ("00000001", "00000002")
    with pytest.raises(gspo.InputError, match=r"no checkpoint '7'.*There are: 1, 2, last, best"):
        export(run, tmp_path / "other", checkpoint="7")
    with pytest.raises(gspo.InputError, match="no run here"):
        export(tmp_path, tmp_path / "other")
    with pytest.raises(gspo.InputError, match=f"a checkpoint, not a run: give the run {run} and --checkpoint 1"):
        export(run / "checkpoints" / "00000001", tmp_path / "other")
    assert not (tmp_path / "other").exists()


def test_a_generation_config_that_is_not_strict_is_cut_to_its_ids(run: Path, tmp_path: Path) -> None:
    """temperature without do_sample: transformers warns when it loads it and refuses to save it."""
    copy = tmp_path / "run" / "checkpoints" / "00000001"
    source = find(run, "last")
    copy.mkdir(parents=True)
    for path in source.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    (tmp_path / "run" / "run.yaml").write_text("{}")
    plain = json.loads((source / "generation_config.json").read_text())
    (copy / "generation_config.json").write_text(json.dumps({**plain, "temperature": 0.3, "do_sample": False}))
    (copy / "checksums.json").unlink()
    seal(copy)
    export(tmp_path / "run", tmp_path / "out")
    found = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert "temperature" not in found
    assert found["eos_token_id"] == plain["eos_token_id"]


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["export", str(run), str(tmp_path / "out"), "--checkpoint", "best", "--dtype", "float16"]
    assert cli.guarded(lambda: cli.app(words)) == 0
    assert "exported" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "config.json").read_text())["dtype"] == "float16"
    assert cli.guarded(lambda: cli.app(words)) == 2


# ------------------------------------------------------------------------------ adapters and critics


@pytest.fixture(scope="module", params=["tiny-dense", "tiny-moe"])
def adapted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of PPO that trained an adapter, so that its checkpoints hold a critic too."""
    model = {"name": request.param, "dtype": "float32", "lora": 4}
    keys = {**KEYS, "data": "sort:4", "model": model, "algorithm": "ppo", "optimizer": {"learning_rate": 1e-2}}
    return gspo.train("tiny", dir=tmp_path_factory.mktemp("adapted") / "run", **keys).folder


def test_an_adapter_is_exported_merged_into_its_base(adapted: Path, tmp_path: Path) -> None:
    source = export(adapted, tmp_path / "out")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"model.safetensors", "config.json", "generation_config.json", "tokenizer_config.json"} <= names
    assert not [name for name in names if "adapter" in name or "critic" in name or "optimizer" in name]
    ids = AutoTokenizer.from_pretrained(tmp_path / "out")("d b a c\n\na b c d", return_tensors="pt").input_ids[0]
    torch.testing.assert_close(theirs(tmp_path / "out", ids), ours(source, ids), rtol=0, atol=1e-4)
    base = AutoModelForCausalLM.from_pretrained(json.loads((source / "adapter_config.json").read_text())["base_model_name_or_path"])  # fmt: skip
    merged = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (merged[name] - base.state_dict()[name]).abs().max() > 1e-4


def test_an_adapter_is_exported_alone_when_asked(adapted: Path, tmp_path: Path, capsys: Any) -> None:
    assert cli.guarded(lambda: cli.app(["export", str(adapted), str(tmp_path / "out"), "--adapter"])) == 0
    assert "exported" in capsys.readouterr().out
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {path.name for path in (tmp_path / "out").glob("*.safetensors")} == {"adapter_model.safetensors"}
    assert "adapter_config.json" in names
    source = find(adapted, "last")
    a, b = (load_file(folder / "adapter_model.safetensors") for folder in (source, tmp_path / "out"))
    assert a.keys() == b.keys()
    assert all(torch.equal(a[key], b[key]) for key in a)
    again = load_policy(config.Model(name=str(tmp_path / "out"), dtype="float32"))
    assert again.source.sha256 == load_policy(config.Model(name=str(source), dtype="float32")).source.sha256


def test_a_run_of_all_weights_has_no_adapter_to_export(run: Path, tmp_path: Path) -> None:
    with pytest.raises(gspo.InputError, match="there is no adapter in it"):
        export(run, tmp_path / "out", adapter=True)
    assert not (tmp_path / "out").exists()
