"""Replay of experts in a training step: what it holds still, what it must not change, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PhimoeConfig

import gspo
from experts import MODES, ROW, Recorder, learner_of, moe, sampled
from gspo import PRESETS, InputError, RunError, config, settings
from gspo.batch import Batch, make_batches
from gspo.build import build
from gspo.critic_config import Critic
from gspo.models.load import Policy
from gspo.models.tiny import tiny_moe
from gspo.models.values import ValueHead
from gspo.objectives import policy_objective
from gspo.stats import UpdateStats
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop


def step(
    policy: Policy, groups: Sequence[Group], mode: str, updates: int = 1, budget: int = 10_000
) -> tuple[Recorder, list[Batch], list[UpdateStats]]:
    learner = learner_of(policy, mode, ROW.model_copy(update={"updates_per_step": updates}))
    batches = learner.annotate(make_batches(groups, learner.row, budget))
    return learner, batches, [learner.update(batch, policy_objective(learner.row)) for batch in batches]


def equal(one: dict[str, Tensor], other: dict[str, Tensor], rtol: float = 1e-9, atol: float = 1e-12) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=rtol, atol=atol) for name in one)


# ------------------------------------------------------------------------------ P10


def test_replay_closes_the_gap_between_engine_and_trainer() -> None:
    """The field's P10, in float32: routers that see noise of 1e-3 in the engine."""
    gaps, found = {}, {}
    for noise in (0.0, 1e-3):
        for mode in MODES:
            policy = moe("float32")
            with torch.no_grad():
                for layer in policy.model.model.layers:
                    layer.mlp.gate.weight.mul_(0.02)  # some choices are close, as they are in large models
            _, batches, (stats,) = step(policy, sampled(policy, noise, prompts=8, answers=8), mode)
            gaps[mode, noise], found[mode, noise] = stats.parity.largest, stats.routes
            assert batches[0].rollout_routes_TLK is not None
    print({key: f"{gap:.1e}" for key, gap in gaps.items()}, found["off", 1e-3].rollout_old.share)
    assert gaps["rollout", 0.0] < 1e-4, "float32 noise, with weights this large"
    assert found["rollout", 0.0].rollout_old.share == 0
    assert found["rollout", 0.0].replayed.share == 0
    assert gaps["rollout", 1e-3] < 2e-2, "what the gates feel"
    assert gaps["off", 1e-3] > 10 * gaps["rollout", 1e-3]
    assert gaps["off", 1e-3] == gaps["old", 1e-3], "the first update of a step has nothing of the old policy to replay"
    share = found["off", 1e-3].rollout_old.share
    assert share is not None
    assert 0 < share < 0.05, "flips are reported"
    assert found["off", 1e-3].replayed.share is None


# ------------------------------------------------------------------------------ what it must not change


def second_update(
    groups: Sequence[Group], mode: str, budget: int = 10_000, **model: Any
) -> tuple[dict[str, Tensor], Batch, UpdateStats]:
    """The second update of a step, after weights that moved as if by a first: Adam would make much of rounding."""
    policy = moe(**model)
    learner = learner_of(policy, mode, ROW.model_copy(update={"updates_per_step": 2}))
    _, batch = learner.annotate(make_batches(groups, learner.row, budget))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for p in policy.model.parameters():
            p += 0.05 * p.abs().mean() * torch.randn(p.shape, generator=generator, dtype=p.dtype)
    learner._fresh = False
    stats = learner.update(batch, policy_objective(learner.row))
    return learner.gradients, batch, stats


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_does_not_depend_on_micro_batches_or_order(mode: str) -> None:
    """With experts of an engine that chose quite differently, and of an old policy: recorded, replayed, cut anywhere."""
    groups = sampled(moe(), noise=1.0)
    whole, _, stats = second_update(groups, mode)
    for changes in (stats.routes.rollout_old, stats.routes.old_new):
        assert changes.share is not None
        assert changes.share > 0.02, "experts that hardly differ would hide a mix-up"
    shuffled = [replace(g, rollouts=g.rollouts[::-1]) for g in groups]
    for cut, budget in ((groups, 1), (shuffled, 60), (groups, 35)):
        gradients, batch, again = second_update(cut, mode, budget)
        assert len(batch.plan) > 1
        assert equal(gradients, whole, rtol=1e-5, atol=1e-7), "routers take their softmax in float32"
        for name in ("rollout_old", "old_new", "replayed"):
            found, expected = (getattr(x.routes, name).by_layer for x in (again, stats))
            assert found == (expected and pytest.approx(expected)), "a prompt that stands twice counts once"


@pytest.mark.parametrize("mode", ["old", "rollout"])
def test_recomputed_activations_give_the_same_gradient(mode: str) -> None:
    groups = sampled(moe(), noise=1.0)
    plain, _, _ = second_update(groups, mode)
    saving, _, _ = second_update(groups, mode, gradient_checkpointing=True)
    assert equal(saving, plain)
    assert not equal(saving, second_update(groups, "off")[0], rtol=1e-2)


@pytest.mark.parametrize("mode", MODES)
def test_an_adapter_trains_with_the_same_experts_however_it_is_cut(mode: str) -> None:
    """The engine samples with merged weights, and its experts are replayed in the adapted model."""
    lora = config.Lora(rank=4, targets=("all-linear",))
    groups = sampled(moe(), noise=1.0)
    whole, _, stats = second_update(groups, mode, lora=lora)
    parts, batch, again = second_update(groups, mode, 35, lora=lora)
    assert len(batch.plan) > 1
    assert all("lora_" in name for name in whole)
    assert equal(parts, whole, rtol=1e-5, atol=1e-7)
    expected = stats.routes.replayed.by_layer
    assert again.routes.replayed.by_layer == (expected and pytest.approx(expected))
    if mode != "off":
        assert not equal(whole, second_update(groups, "off", lora=lora)[0], rtol=1e-2)


def test_a_critic_on_the_layers_reads_what_the_replayed_experts_made() -> None:
    """Its values before the step, and at the updates: cut anywhere, with experts of an engine of its own mind."""
    groups, found = sampled(moe(), noise=1.0), {}
    for mode, budget in (("rollout", 10_000), ("rollout", 35), ("off", 10_000)):
        policy = moe()
        head = ValueHead(policy.model.config.hidden_size, dtype=torch.float64, device=torch.device("cpu"))
        torch.nn.init.ones_(head.weight)
        row = PRESETS["ppo"].model_copy(update={"updates_per_step": 1})
        learner = learner_of(policy, mode, row, critic=Critic(), value_head=head)
        (batch,) = learner.annotate(make_batches(groups, learner.row, budget))
        learner.update(batch, policy_objective(learner.row))
        assert batch.value_N is not None
        found[mode, budget] = batch.value_N, learner.gradients
    (whole_N, whole), (parts_N, parts), (off_N, off) = found.values()
    torch.testing.assert_close(parts_N, whole_N, rtol=1e-5, atol=1e-7)
    assert equal(parts, whole, rtol=1e-5, atol=1e-7)
    assert not torch.allclose(off_N, whole_N, rtol=1e-2)
    assert not equal(off, whole, rtol=1e-2)


def test_other_micro_batches_after_memory_ran_out_keep_the_old_experts() -> None:
    """After the first update the old pass cannot be done again: its experts move to the new cut."""
    policy = moe()
    groups = sampled(policy)
    learner = learner_of(policy, "old", ROW.model_copy(update={"updates_per_step": 2}))
    first, second = learner.annotate(make_batches(groups, learner.row, 10_000))
    learner.update(first, policy_objective(learner.row))
    _, cut = learner.recut(make_batches(groups, learner.row, 30), [first, second])
    assert len(cut.plan) > len(second.plan)
    assert len(cut.tokens_T) > len(second.tokens_T), "a prompt is repeated"
    old, new = second.old_routes_TLK, cut.old_routes_TLK
    assert old is not None
    assert new is not None
    at = {int(home): i for i, home in enumerate(second.home_T)}
    same = torch.tensor([at[int(home)] for home in cut.home_T])
    assert torch.equal(cut.tokens_T, second.tokens_T[same])
    assert torch.equal(cut.position_T, second.position_T[same])
    assert torch.equal(new, old[same])
    stats = learner.update(cut, policy_objective(learner.row))
    assert stats.routes.replayed.tokens == pytest.approx(len(second.tokens_T))


# ------------------------------------------------------------------------------ where the modes agree and differ


def test_on_policy_the_modes_agree_and_an_engine_of_its_own_mind_is_followed() -> None:
    groups = sampled(moe())
    off, old, rollout = (step(moe(), groups, mode)[0].gradients for mode in MODES)
    assert equal(off, old, rtol=0, atol=0)
    assert equal(off, rollout)
    noisy = sampled(moe(), noise=1.0)
    off, old, rollout = (step(moe(), noisy, mode)[0].gradients for mode in MODES)
    assert equal(off, old, rtol=0, atol=0), "one update: its own forward is the old policy"
    assert not equal(off, rollout, rtol=1e-2), "the engine's experts are used"


def test_after_an_update_old_experts_are_used_and_their_change_is_reported() -> None:
    groups = sampled(moe())
    runs = {mode: step(moe(), groups, mode, updates=2) for mode in MODES}
    second = {mode: stats[1].routes for mode, (_, _, stats) in runs.items()}
    assert runs["off"][2][1].tally != runs["old"][2][1].tally
    assert not equal(runs["off"][0].gradients, runs["old"][0].gradients, rtol=1e-2)
    # The engine is the trainer's own model here: its experts are the old policy's.
    assert equal(runs["old"][0].gradients, runs["rollout"][0].gradients)
    for mode in MODES:
        assert second[mode].rollout_old.share == 0
        assert second[mode].old_new.share
        # No expert comes before the first layer's router, so the same update gives it the same change in every mode.
        assert second[mode].old_new.changed_L[0] == second["off"].old_new.changed_L[0]
    assert second["off"].replayed.share is None
    assert second["old"].replayed == second["old"].old_new, "what is missed is what has changed"
    first = runs["old"][2][0].routes
    assert (first.old_new.share, first.replayed.share) == (None, None), "nothing to replay in the first update"


def test_replay_holds_the_ratio_still() -> None:
    """A step large enough to change many experts: the ratio's spread with and without."""
    groups = sampled(moe())
    spread = {mode: step(moe(), groups, mode, updates=2)[2][1].tally.std_log_ratio_tokens for mode in MODES}
    print(spread)
    assert spread["old"] < spread["off"]


def test_a_row_that_reads_no_old_policy_gets_its_experts() -> None:
    row = PRESETS["dppo"].model_copy(update={"updates_per_step": 2})
    policy = moe()
    groups = sampled(policy)
    learner = learner_of(policy, "old", row)
    first, second = learner.annotate(make_batches(groups, row, 1000))
    assert first.old_routes_TLK is None
    assert second.old_routes_TLK is not None


def test_the_reference_keeps_its_own_experts() -> None:
    row = ROW.model_copy(update={"kl_coefficient": 0.1, "updates_per_step": 1})
    policy, groups = moe(), sampled(moe(), noise=1.0)
    found = []
    for mode in ("off", "rollout"):
        learner = learner_of(policy, mode, row, reference=moe().model.requires_grad_(False))
        (batch,) = learner.annotate(make_batches(groups, row, 1000))
        assert batch.reference_logprob_N is not None
        found.append(batch.reference_logprob_N)
    assert torch.equal(*found)


@pytest.mark.parametrize("mode", MODES)
def test_in_bfloat16_an_unchanged_policy_has_a_ratio_of_exactly_one(mode: str) -> None:
    policy = moe("bfloat16")
    groups = sampled(policy)
    learner = learner_of(policy, mode, ROW.model_copy(update={"updates_per_step": 2}))
    _, second = learner.annotate(make_batches(groups, learner.row, 64))
    stats = learner.update(second, policy_objective(learner.row))
    assert stats.tally.log_ratio_tokens_square == 0.0
    assert stats.routes.old_new.share == 0.0


# ------------------------------------------------------------------------------ layout and refusals


def test_routes_are_laid_out_with_the_tokens_and_a_prompt_has_its_own_once() -> None:
    def routes(*experts: int) -> np.ndarray:
        return np.array(experts, dtype=np.uint8)[:, None, None]

    def answer(i: int, ids: list[int], segments: Sequence[Segment]) -> Rollout:
        return Rollout(i, tuple(segments), "", Stop.EOS, (0, 0), Reward(float(i)))

    def segment(ids: list[int], own: bool, experts: np.ndarray, parent: int | None = None) -> Segment:
        return Segment(np.array(ids), np.full(len(ids), own), np.zeros(len(ids), np.float32), parent, experts)

    first = [
        segment([5, 6], True, routes(50, 60)),
        segment([7], False, routes(70), 0),
        segment([8, 9], True, routes(80), 1),
    ]
    second = [segment([4, 3], True, routes(40, 30))]  # the last one was computed, and predicts nothing
    prompt = Prompt(0, "", np.array([90, 91]), {})
    group = Group(prompt, 0, (answer(0, [], first), answer(1, [], second)), routes(190, 191))
    row = PRESETS["gspo"].model_copy(update={"updates_per_step": 1})
    for budget, tokens in ((100, [90, 91, 5, 6, 7, 8, 4]), (6, [90, 91, 5, 6, 7, 8, 90, 91, 4])):
        (batch,) = make_batches([group], row, budget)
        assert batch.tokens_T.tolist() == tokens
        assert batch.rollout_routes_TLK is not None
        expected = [100 + t if t >= 90 else 10 * t for t in tokens]
        assert batch.rollout_routes_TLK.flatten().tolist() == expected
    assert batch.home_T.tolist() == [0, 1, 2, 3, 4, 5, 0, 1, 6]
    assert batch.copies().tolist() == [2, 2, 1, 1, 1, 1, 2, 2, 1]

    lacking = replace(first[0], routes=routes(50))
    with pytest.raises(
        RunError, match=r"row 0, answer 0: segment 1 goes on where segment 0 ends, .* 2 tokens and routes of 1"
    ):
        make_batches([replace(group, rollouts=(answer(0, [], [lacking, *first[1:]]), group.rollouts[1]))], row, 100)
    with pytest.raises(RunError, match="row 0, answer 1: its prompt has routes and its segment 0 has none"):
        make_batches(
            [replace(group, rollouts=(group.rollouts[0], answer(1, [], [replace(second[0], routes=None)])))], row, 9
        )
    with pytest.raises(RunError, match="its segment 0 has routes and its prompt has none"):
        make_batches([replace(group, prompt_routes=None)], row, 100)


def test_routes_of_another_length_are_refused() -> None:
    ids, mask, logprobs = np.array([5, 6, 7]), np.ones(3, dtype=bool), np.zeros(3, np.float32)
    for length in (1, 4):
        with pytest.raises(
            ValueError, match=f"a segment of 3 tokens has routes of {length}: 3 are needed, or one less"
        ):
            Segment(ids, mask, logprobs, None, np.zeros((length, 2, 2), np.uint8))
    with pytest.raises(ValueError, match="row 4: a prompt of 2 tokens has routes of 3"):
        Group(Prompt(4, "", np.array([8, 9]), {}), 0, (), np.zeros((3, 2, 2), np.uint8))


def test_experts_that_were_not_recorded_or_are_of_another_model_are_refused() -> None:
    policy = moe()
    groups = sampled(policy)
    bare = [
        replace(
            g,
            prompt_routes=None,
            rollouts=tuple(replace(r, segments=(replace(r.segments[0], routes=None),)) for r in g.rollouts),
        )
        for g in groups
    ]
    with pytest.raises(RunError, match=r"algorithm.routing=rollout replays .* have none recorded"):
        step(policy, bare, "rollout")
    _, _, (stats,) = step(policy, bare, "off")
    assert stats.routes.rollout_old.share is None
    wrong = [replace(g, prompt_routes=g.prompt_routes + np.uint8(4)) for g in groups if g.prompt_routes is not None]
    with pytest.raises(RunError, match=r"expert \d is in the routes, and the model has 4"):
        step(policy, wrong, "rollout")


# ------------------------------------------------------------------------------ the command


def run(folder: Path, algorithm: str, steps: int = 2, **keys: Any) -> list[dict[str, Any]]:
    fixed: dict[str, Any] = dict(prompts_per_step=4, group_size=4, threads=1, reward=digits, eval={"every": 0})
    model = {"name": "random-moe", "dtype": "float32"}
    algorithms = {"name": algorithm, **keys}
    gspo.train("tiny", dir=folder, steps=steps, model=model, algorithm=algorithms, **fixed)
    return journal(folder)


def digits(completion: str) -> float:
    return sum(c.isdigit() for c in completion) / max(1, len(completion))


def journal(folder: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith("time/")} for line in lines]


def test_grpo_replays_by_default_and_gspo_does_not(tmp_path: Path) -> None:
    for algorithm, mode in (("grpo", "old"), ("gspo", "off"), ("minirl", "rollout")):
        lines = run(tmp_path / algorithm, algorithm)
        assert [line["routing"] for line in lines] == [mode] * 2
        assert all(line["routing/changed_old_new"] >= 0 for line in lines)
        assert all(len(line["routing/changed_old_new_layers"]) == 2 for line in lines)
        assert all((line["routing/replay_hits"] is None) == (mode == "off") for line in lines)
        assert all((line["routing/replayed_tokens"] == 0) == (mode == "off") for line in lines)
        assert all(line["routing/changed_rollout_old"] == 0 for line in lines), "float32, one model object"
        if mode == "old":
            hits = [line["routing/replay_hits"] for line in lines]
            assert hits == pytest.approx([1 - line["routing/changed_old_new"] for line in lines]), (
                "missed: what changed"
            )


@pytest.mark.parametrize("mode", ["old", "rollout"])
def test_a_run_that_replays_goes_on_bit_for_bit(mode: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", "gspo", steps=3, routing=mode)
    run(tmp_path / "parts", "gspo", steps=2, routing=mode)
    gspo.train(resume=tmp_path / "parts", reward=digits, steps=3)
    assert journal(tmp_path / "parts") == whole
    one, other = (
        load_file(tmp_path / name / "checkpoints" / "00000003" / "model.safetensors") for name in ("whole", "parts")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_the_words_of_the_command_line(tmp_path: Path) -> None:
    """YAML reads off as false."""
    assert settings.load("tiny", ["algorithm=grpo", "algorithm.routing=off"]).algorithm.routing == "off"
    assert settings.load("tiny", ["algorithm=grpo"]).algorithm.routing == "old"
    assert settings.load("tiny", ["algorithm.routing=rollout"]).algorithm.routing == "rollout"
    again = tmp_path / "run.yaml"
    again.write_text(yaml.safe_dump(settings.dump(settings.load("tiny", ["algorithm.routing=off"]))))
    assert settings.load(again).algorithm.routing == "off"
    with pytest.raises(InputError, match=r"algorithm.routing: .*'off', 'old' or 'rollout'"):
        settings.load("tiny", ["algorithm.routing=r3"])
    with pytest.raises(InputError, match=r"algorithm.routing: .*'off', 'old' or 'rollout'"):
        settings.load("tiny", ["algorithm.routing=on"])


def test_replay_without_experts_is_refused_and_a_default_says_nothing(tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match=r"algorithm.routing=old has no effect with model=random-dense, which has no experts"
    ):
        build(settings.load("tiny", [f"dir={tmp_path / 'a'}", "threads=1", "algorithm.routing=old"]))
    build(settings.load("tiny", [f"dir={tmp_path / 'b'}", "threads=1", "algorithm=grpo"]))


def test_a_load_is_balanced_only_on_demand_and_needs_experts(tmp_path: Path) -> None:
    assert all(line["routing/imbalance"] >= 2 for line in run(tmp_path / "set", "gspo", load_balance=0.01))
    assert all(line["routing/imbalance"] is None for line in run(tmp_path / "unset", "gspo"))
    with pytest.raises(InputError, match=r"algorithm.load_balance=0.01 has no effect with model=random-dense"):
        build(settings.load("tiny", [f"dir={tmp_path / 'a'}", "threads=1", "algorithm.load_balance=0.01"]))


def test_experts_of_unknown_routers_are_refused_by_name(tmp_path: Path) -> None:
    model, tokenizer = tiny_moe()
    keys = {key: getattr(model.config, key) for key in ("vocab_size", "hidden_size", "eos_token_id", "bos_token_id")}
    shape = dict(intermediate_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2)
    config = PhimoeConfig(**keys, **shape, num_local_experts=4, pad_token_id=None, lm_head_bias=True)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "phi")
    tokenizer.save_pretrained(tmp_path / "phi")
    words = [f"dir={tmp_path / 'run'}", "threads=1", f"model={tmp_path / 'phi'}"]
    with pytest.raises(
        InputError, match=r"algorithm.routing=old: the experts of PhimoeForCausalLM .* PhimoeSparseMoeBlock"
    ):
        build(settings.load("tiny", [*words, "algorithm=grpo"]))
    build(settings.load("tiny", [*words, "algorithm=gspo"]))
