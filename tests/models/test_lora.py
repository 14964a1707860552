"""Adapters: peft's own forward and gradient, merged weights, the reference, folders that peft loads, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compiled import needs_kernels
from safetensors.torch import load_file
from torch import Tensor, nn

import norms
from gspo import config
from gspo.batch import make_batches
from gspo.engines.engine import Request
from gspo.engines.local import LocalEngine
from gspo.engines.rounding import rounded
from gspo.errors import InputError
from gspo.learner import Learner, cast
from gspo.models import lora
from gspo.models.load import Policy, load_policy
from gspo.models.packing import PackedWeights
from gspo.objectives import policy_objective
from gspo.presets import PRESETS
from gspo.types import Group, Prompt, Reward

NAMES = ["random-dense", "random-moe"]
EXACT = {"random-dense": 1e-10, "random-moe": 1e-6}
"""How near two ways to compute the same come in float64: routers take their softmax in float32."""
ROW = PRESETS["grpo"].model_copy(update={"updates_per_step": 1, "routing": "off"})


def adapted(name: str = "random-dense", dtype: str = "float64", size: float = 0.1, **keys: Any) -> Policy:
    """A model with an adapter that has been trained a little: its B is `size` in size."""
    model = config.Model(name=name, dtype=dtype, lora=config.Lora(rank=4), **keys)  # type: ignore[arg-type]
    policy = load_policy(model, seed=3)
    disturb(policy.model, size)
    if dtype == "float64":
        norms.in_float64(policy.model)
    return policy


def disturb(model: Any, size: float) -> None:
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if ".lora_B." in name:
                p.add_(size * torch.randn(p.shape, generator=generator).to(p))


def saved(policy: Policy, folder: Path) -> str:
    adapter = lora.adapter_of(policy.model)
    assert adapter is not None
    folder.mkdir(parents=True, exist_ok=True)
    adapter.save(folder, policy.model.state_dict())
    return str(folder)


def by_peft(name: str, folder: str) -> Any:
    """The same adapter on an untouched model of transformers, by peft alone."""
    from peft import PeftModel

    from gspo.models.builtin import BUILTIN

    plain = BUILTIN[name].model().eval().to(torch.float64)
    if name == "random-moe":
        plain.set_experts_implementation("eager")  # the grouped product has no float64
    plain.set_attn_implementation("sdpa")  # eager makes its softmax in float32
    peft = PeftModel.from_pretrained(plain, folder, is_trainable=True, autocast_adapter_dtype=False).eval()
    norms.in_float64(peft)
    return peft


def sampled(policy: Policy, prompts: int = 3, answers: int = 4) -> list[Group]:
    engine = LocalEngine(policy, config.Sampling(max_new_tokens=6), seed=1)
    for row in range(prompts):
        text = f"what is {row} + {row}?"
        ids = np.array(policy.tokenizer(text)["input_ids"])
        engine.submit(Request(prompt=Prompt(row, text, ids, {}), ordinal=row, count=answers))
    groups = sorted(engine.collect(), key=lambda g: g.ordinal)
    return [g.with_rewards([Reward(float((i + g.ordinal) % 3)) for i in range(answers)]) for g in groups]


def learner_of(policy: Policy, row: Any = ROW, rate: float = 1e-2, **keys: Any) -> Learner:
    return Learner(
        model=policy.model,
        row=row,
        settings=config.Optimizer(learning_rate=rate),
        temperature=1.0,
        max_new_tokens=6,
        total_updates=8,
        compute_dtype=policy.compute_dtype,
        kernels=policy.kernels,
        **keys,
    )


@torch.no_grad()
def logits_of(model: Any) -> Tensor:
    """Of a few tokens, by the attention of transformers."""
    model.set_attn_implementation("sdpa")
    found: Tensor = model(input_ids=torch.arange(5, 17)[None], use_cache=False).logits
    return found


def logprobs_one_at_a_time(model: Any, groups: list[Group]) -> list[Tensor]:
    """Of every answer, by the model's own logits."""
    found = []
    for group in groups:
        prompt = torch.from_numpy(group.prompt.token_ids)
        for rollout in group.rollouts:
            ids = torch.cat([prompt, torch.from_numpy(rollout.segments[0].token_ids)])
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(prompt) - 1 : -1]
            found.append(torch.log_softmax(logits, -1).gather(-1, ids[len(prompt) :, None])[:, 0])
    return found


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_values_and_gradients_are_pefts_own_one_sequence_at_a_time(
    name: str, checkpointing: bool, tmp_path: Path
) -> None:
    """On policy the gradient is that of -1/S sum_i A_i / n_i sum_t log pi."""
    policy = adapted(name, gradient_checkpointing=checkpointing)
    groups = sampled(policy)
    peft = by_peft(name, saved(policy, tmp_path / "adapter"))
    learner = learner_of(policy)
    (batch,) = learner.annotate(make_batches(groups, ROW, 10_000))
    expected = logprobs_one_at_a_time(peft, groups)
    torch.testing.assert_close(learner.logprobs(policy.model, batch), torch.cat(expected), rtol=0, atol=EXACT[name])

    learner._accumulate(batch, policy_objective(ROW))
    assert batch.advantage_R is not None
    terms = [a * each.mean() for a, each in zip(batch.advantage_R, expected, strict=True)]
    (-torch.stack(terms).mean()).backward()
    own = {key.removeprefix("base_model.model."): p.grad for key, p in peft.named_parameters() if p.requires_grad}
    assert learner.masters.keys() == own.keys()
    for key, master in learner.masters.items():
        assert master.grad is not None
        torch.testing.assert_close(master.grad, own[key], rtol=100 * EXACT[name], atol=EXACT[name], msg=key)


@pytest.mark.parametrize("name", NAMES)
def test_merged_and_unmerged_give_the_same_log_probabilities(name: str) -> None:
    """field report P09: merged weights under names that the engine does not expect changed nothing that was sampled."""
    policy = adapted(name)
    groups = sampled(policy)  # by the engine, merged
    learner = learner_of(policy)
    (batch,) = learner.annotate(make_batches(groups, ROW, 10_000))
    unmerged_N = learner.logprobs(policy.model, batch)
    assert (unmerged_N - batch.rollout_logprob_N).abs().max() < 1e-5  # kept in float32
    plain = load_policy(config.Model(name=name, dtype="float64"))
    norms.in_float64(plain.model)
    assert (learner.logprobs(plain.model, batch) - unmerged_N).abs().max() > 1e-2, "the adapter counts"
    own = dict(plain.model.named_parameters())
    with torch.no_grad():
        for place, w in learner.weights():
            own.pop(place).copy_(w)
    assert not own, "every weight of a plain checkpoint is there, by its name"
    torch.testing.assert_close(learner.logprobs(plain.model, batch), unmerged_N, rtol=0, atol=EXACT[name])


def test_the_merge_is_rounded_once() -> None:
    policy = adapted("random-dense", "bfloat16", size=0.02)
    learner = learner_of(policy)
    name, layer = next(lora.adapted_layers(policy.model))
    weight = layer.base_layer.weight
    assert weight.dtype == torch.bfloat16
    a, b = (part["default"].weight.double() for part in (layer.lora_A, layer.lora_B))
    exact = weight.double() + layer.scaling["default"] * b @ a
    merged = dict(learner.weights())[f"{name}.weight"]
    assert merged.dtype == torch.bfloat16
    assert (merged != exact.bfloat16()).double().mean() < 0.01  # but for ties of float32
    assert (merged != weight).any()


@pytest.mark.parametrize("name", NAMES)
def test_a_rounded_engine_answers_with_the_rounded_merged_weights(name: str) -> None:
    policy = adapted(name, "float32")
    engine = LocalEngine(policy, config.Sampling(max_new_tokens=4), seed=1, weights="int8")
    learner = learner_of(policy)
    disturb(policy.model, 0.2)
    engine.load(learner.weights(), version=1)
    own = dict(engine._policy.model.named_parameters())
    merged = dict(lora.named_weights(policy.model))
    assert own.keys() == merged.keys()
    for key, w in merged.items():
        torch.testing.assert_close(own[key], rounded(w, "int8"), rtol=0, atol=0)
    assert lora.adapter_of(policy.model) is not None, "the trainer keeps its adapter"


def test_nothing_of_a_merge_stays() -> None:
    policy = adapted()
    before = {name: p.clone() for name, p in policy.model.state_dict().items()}
    unmerged = logits_of(policy.model)
    with PackedWeights(policy.model):
        inside = logits_of(policy.model)
    assert torch.equal(logits_of(policy.model), unmerged)
    assert not torch.equal(inside, unmerged)
    torch.testing.assert_close(inside, unmerged, rtol=0, atol=1e-10)
    assert all(torch.equal(before[name], p) for name, p in policy.model.state_dict().items())


# ------------------------------------------------------------------------------ training


def test_only_the_adapter_has_masters_and_the_base_is_in_the_compute_dtype() -> None:
    policy = adapted("random-dense", "bfloat16")
    learner = learner_of(policy)
    assert all(lora._is_adapters(name) for name in learner.masters)
    assert {p.dtype for p in learner.masters.values()} == {torch.float32}
    assert {p.dtype for p in policy.model.parameters()} == {torch.bfloat16}
    assert {p.requires_grad for name, p in policy.model.named_parameters() if not lora._is_adapters(name)} == {False}


@pytest.mark.parametrize(
    ("dtype", "compiled"),
    [("float32", False), ("bfloat16", False), pytest.param("bfloat16", True, marks=needs_kernels)],
)
def test_the_first_update_moves_b_alone_and_is_no_failure(dtype: str, compiled: bool) -> None:
    """field report P40: B at zero makes the gradient of A exactly zero once, which is no sign of a dead run.

    Afterwards every matrix moves, also of those whose values go through a formula that a kernel computes.
    """
    model = config.Model(name="random-dense", dtype=dtype, compile=compiled, lora=config.Lora(rank=4))  # type: ignore[arg-type]
    policy = load_policy(model)
    assert (policy.kernels is not None) == compiled
    groups, learner = sampled(policy), learner_of(policy)
    start = {name: p.detach().clone() for name, p in learner.masters.items()}
    base = {n: p.detach().clone() for n, p in policy.model.named_parameters() if not lora._is_adapters(n)}

    def step() -> None:
        (batch,) = learner.annotate(make_batches(groups, ROW, 10_000))
        stats = learner.update(batch, policy_objective(ROW))
        assert stats.grad_norm > 0
        assert learner.change().changed > 0

    step()
    moved = {name for name, p in learner.masters.items() if not torch.equal(p, start[name])}
    assert moved == {name for name in start if ".lora_B." in name}
    step()
    assert all(not torch.equal(p, start[name]) for name, p in learner.masters.items())
    assert all(torch.equal(p, base[n]) for n, p in policy.model.named_parameters() if n in base)


@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
@pytest.mark.parametrize("fresh", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_the_kl_from_the_reference_is_zero_at_the_start(name: str, fresh: bool, dtype: str, tmp_path: Path) -> None:
    """The reference of a fresh adapter is the base; of one that goes on, the adapter that it started from."""
    row = ROW.model_copy(update={"kl_coefficient": 0.1})
    start = None if fresh else Path(saved(adapted(name, size=0.3), tmp_path / "start"))
    model = config.Model(name=name, dtype=dtype, lora=config.Lora(start=None if start is None else str(start)))  # type: ignore[arg-type]
    policy = load_policy(model)
    groups = sampled(policy)
    reference = lora.Reference(policy.model, lora.asked(model).start)
    learner = learner_of(policy, row, reference=reference)
    (batch,) = learner.annotate(make_batches(groups, row, 10_000))
    assert learner.update(batch, policy_objective(row)).tally.kl == pytest.approx(0, abs=1e-6)
    (again,) = learner.annotate(make_batches(groups, row, 10_000))
    assert again.reference_logprob_N is not None
    assert batch.reference_logprob_N is not None
    assert torch.equal(again.reference_logprob_N, batch.reference_logprob_N), "it stands still"
    assert learner.update(again, policy_objective(row)).tally.kl > 1e-9
    base = load_policy(config.Model(name=name, dtype=dtype)).model  # type: ignore[arg-type]
    cast(base, policy.compute_dtype)
    gap = float((learner.logprobs(base, batch) - batch.reference_logprob_N).abs().max())
    assert gap < 1e-6 if fresh else gap > 1e-2, gap


# ------------------------------------------------------------------------------ folders


@pytest.mark.parametrize("name", NAMES)
def test_an_adapters_folder_is_a_model_and_says_its_base(name: str, tmp_path: Path) -> None:
    policy = adapted(name, "float32")
    folder = saved(policy, tmp_path / "adapter")
    assert sorted(p.name for p in Path(folder).iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    for model in (config.Model(name=folder, dtype="float32"), config.Model(name=name, dtype="float32", lora=config.Lora(start=folder))):  # fmt: skip
        again = load_policy(model)
        assert all(torch.equal(w, again.model.state_dict()[key]) for key, w in policy.model.state_dict().items())
        assert again.source.sha256 == policy.source.sha256


@pytest.mark.parametrize("name", NAMES)
def test_a_merged_model_is_a_plain_checkpoint(name: str, tmp_path: Path) -> None:
    policy = adapted(name, "float32")
    unmerged = logits_of(policy.model)
    merged = lora.merge(load_policy(config.Model(name=saved(policy, tmp_path / "adapter"), dtype="float32")).model)
    merged.save_pretrained(tmp_path / "merged")
    policy.tokenizer.save_pretrained(tmp_path / "merged")
    assert not [key for key in load_file(tmp_path / "merged" / "model.safetensors") if "lora" in key or "base" in key]
    plain = load_policy(config.Model(name=str(tmp_path / "merged"), dtype="float32"))
    assert lora.adapter_of(plain.model) is None
    torch.testing.assert_close(logits_of(plain.model), unmerged, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("targets", "parts"),
    [
        ("q_prj", ["'q_prj' matches no layer of LlamaForCausalLM", "did you mean 'q_proj'", "gate_proj"]),
        ("q_proj,mlp", ["'mlp' of LlamaForCausalLM is no linear layer", "up_proj"]),
        ("lm_head", ["'lm_head' of LlamaForCausalLM is no linear layer below the output layer"]),
    ],
)
def test_a_target_that_matches_nothing_is_refused_by_name(targets: str, parts: list[str]) -> None:
    with pytest.raises(InputError) as caught:
        load_policy(config.Model(name="random-dense", lora=config.Lora(targets=targets)))  # type: ignore[arg-type]
    assert [part for part in parts if part not in str(caught.value)] == [], str(caught.value)


def test_targets_are_where_the_adapter_is() -> None:
    model = config.Model(name="random-moe", lora=config.Lora(targets=("q_proj", "experts.down_proj")))
    found = {name.rpartition("layers.")[2] for name, _ in lora.adapted_layers(load_policy(model).model)}
    assert found == {f"{i}.{place}" for i in (0, 1) for place in ("self_attn.q_proj", "mlp.experts")}


def edited(folder: str, **keys: Any) -> str:
    path = Path(folder) / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **keys}))
    return folder


def test_adapters_that_cannot_be_gone_on_from_are_refused(tmp_path: Path) -> None:
    policy = adapted(dtype="float32")
    folder = saved(policy, tmp_path / "adapter")

    def refusal(**keys: Any) -> str:
        with pytest.raises(InputError) as caught:
            load_policy(config.Model(**keys))
        return str(caught.value)

    at = config.Lora(start=folder)
    assert "rank=8: the adapter in" in refusal(name=folder, lora=config.Lora(rank=8))
    assert "are both adapters" in refusal(name=folder, lora=at)
    assert "trained on other weights" in refusal(name="tiny-dense", lora=at)
    assert "no adapter here" in refusal(name="random-dense", lora=config.Lora(start=str(tmp_path)))
    other = edited(saved(policy, tmp_path / "dora"), use_dora=True)
    assert "use_dora; only plain LoRA" in refusal(name=other)
    (tmp_path / "adapter" / "adapter_model.safetensors").write_bytes(b"half")
    assert "could not be read" in refusal(name=folder)


def test_dropout_of_an_adapter_from_elsewhere_is_off(tmp_path: Path) -> None:
    policy = adapted(dtype="float32")
    again = load_policy(config.Model(name=edited(saved(policy, tmp_path / "a"), lora_dropout=0.5), dtype="float32"))
    assert not [m for m in again.model.modules() if isinstance(m, nn.Dropout) and m.p > 0]


def test_the_seed_is_of_a_fresh_adapter_and_touches_no_other_numbers() -> None:
    def first(seed: int) -> Tensor:
        policy = load_policy(config.Model(name="random-dense", lora=config.Lora(rank=2)), seed=seed)
        return next(p for n, p in policy.model.named_parameters() if ".lora_A." in n)

    torch.manual_seed(1)
    expected = torch.rand(1)
    torch.manual_seed(1)
    one, other = first(1), first(2)
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(one, first(1))
    assert not torch.equal(one, other)
