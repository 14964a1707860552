"""The trainer's passes: exact gradients however the batch is cut, exact ratios, master weights, loud failures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from gspo import PRESETS, Algorithm, RunError, config
from gspo.algorithms.losses import Tally
from gspo.batch import make_batches
from gspo.errors import OutOfMemoryError
from gspo.learner import Learner, schedule
from gspo.models.load import Policy, load_policy
from gspo.objectives import policy_objective
from gspo.stats import UpdateStats
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop

Sampled = Callable[..., list[Group]]
ONE_UPDATE = {
    name: PRESETS[name].model_copy(update={"updates_per_step": 1})
    for name in ("gspo", "grpo", "dapo", "dr_grpo", "rloo", "sapo")
}


class GradientRecorder(Learner):
    """Keeps the gradients that the optimizer would have been given."""

    def _step(self, tally: object) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.masters.items() if p.grad is not None}
        self.optimizer.zero_grad()
        return 1.0


def make(policy: Policy, row: Algorithm, kind: type[Learner] = Learner, **keys: object) -> Learner:
    settings = config.Optimizer(learning_rate=1e-3)
    arguments = dict(temperature=1.0, max_new_tokens=6, total_updates=8, compute_dtype=policy.compute_dtype)
    return kind(model=policy.model, row=row, settings=settings, **{**arguments, **keys})  # type: ignore[arg-type]


def gradients(policy: Policy, groups: list[Group], row: Algorithm, budget: int) -> dict[str, Tensor]:
    learner = make(policy, row, GradientRecorder)
    (batch,) = learner.annotate(make_batches(groups, row, budget))
    learner.update(batch, policy_objective(row))
    assert isinstance(learner, GradientRecorder)
    return learner.gradients


def run_step(learner: Learner, groups: list[Group], row: Algorithm) -> list[UpdateStats]:
    return [learner.update(batch, policy_objective(row)) for batch in learner.annotate(make_batches(groups, row, 1000))]


@pytest.mark.parametrize("name", ONE_UPDATE)
def test_the_gradient_does_not_depend_on_micro_batches_or_order(name: str, policy: Policy, sampled: Sampled) -> None:
    """verl-project/verl#5798, #7913: gradients that grow with the number of pieces."""
    groups = sampled(policy)
    whole = gradients(policy, groups, ONE_UPDATE[name], 10_000)
    shuffled = [replace(g, rollouts=g.rollouts[::-1]) for g in groups[::-1]]
    for other in (gradients(policy, groups, ONE_UPDATE[name], 1), gradients(policy, shuffled, ONE_UPDATE[name], 60)):
        for key, gradient in whole.items():
            torch.testing.assert_close(other[key], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", ["gspo", "grpo"])
def test_the_gradient_is_the_papers_one_answer_at_a_time(name: str, policy: Policy, sampled: Sampled) -> None:
    """On policy, -1/S sum_i A_i/n_i sum_t grad log pi (arXiv 2507.18071 eq. 10), silent groups counted in S.

    By the model's own logits and torch's own cross-entropy, with none of our packing, head or loss.
    """
    groups = sampled(policy)
    groups[1] = groups[1].with_rewards([replace(r.reward, value=1.0) for r in groups[1].rollouts if r.reward])
    found = gradients(policy, groups, ONE_UPDATE[name], 50)

    model = policy.model
    rollouts = [(g, r) for g in groups for r in g.rollouts]
    loss = torch.zeros((), dtype=torch.float64)
    for g, r in rollouts:
        rewards = torch.tensor([x.reward.value for x in g.rollouts if x.reward], dtype=torch.float64)
        spread = rewards.std()
        advantage = (rewards[r.index] - rewards.mean()) / spread if spread > 0 else torch.tensor(0.0)
        ids = torch.cat([torch.from_numpy(g.prompt.token_ids), torch.from_numpy(r.segments[0].token_ids)])
        start = len(g.prompt.token_ids)
        model.set_attn_implementation("sdpa")  # eager makes its softmax in float32
        logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
        loss = loss + advantage * torch.nn.functional.cross_entropy(logits, ids[start:]) / len(rollouts)
    model.zero_grad()
    loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-8, atol=1e-12)


def test_a_conversation_that_branches_is_trained_once_a_token(policy: Policy) -> None:
    """Two histories of one rollout share their first turn; each sampled token counts once, after its own history."""
    model = policy.model
    ids = torch.randint(3, 50, (20,), generator=torch.Generator().manual_seed(0)).numpy()

    def segment(part: slice, sampled: bool, parent: int | None) -> Segment:
        tokens = ids[part]
        return Segment(tokens, np.full(len(tokens), sampled), np.zeros(len(tokens), np.float32), parent)

    first, tool, second = (
        segment(slice(4, 7), True, None),
        segment(slice(7, 9), False, 0),
        segment(slice(9, 12), True, 1),
    )
    summary, third = segment(slice(12, 14), False, 0), segment(slice(14, 16), True, 3)
    branching = Rollout(0, (first, tool, second, summary, third), "", Stop.EOS, (0, 0), Reward(1.0))
    other = Rollout(1, (segment(slice(16, 20), True, None),), "", Stop.EOS, (0, 0), Reward(0.0))
    groups = [Group(Prompt(0, "", ids[:4], {}), 0, (branching, other))]
    found = gradients(policy, groups, ONE_UPDATE["gspo"], 1000)

    def logprob(history: list[slice], answer: slice) -> Tensor:
        row = torch.from_numpy(np.concatenate([ids[:4], *(ids[part] for part in history), ids[answer]]))
        count = len(ids[answer])
        logits = model(input_ids=row[None], use_cache=False).logits[0, -count - 1 : -1]
        return torch.log_softmax(logits, -1).gather(1, row[-count:, None])[:, 0]

    model.zero_grad()
    model.set_attn_implementation("sdpa")  # eager makes its softmax in float32
    turns = [logprob([], slice(4, 7)), logprob([slice(4, 7), slice(7, 9)], slice(9, 12))]
    turns.append(logprob([slice(4, 7), slice(12, 14)], slice(14, 16)))
    advantage = 1 / 2**0.5  # rewards 1 and 0, over their standard deviation
    loss = -advantage * torch.cat(turns).mean() / 2 + advantage * logprob([], slice(16, 20)).mean() / 2
    loss.backward()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(found[key], parameter.grad, rtol=1e-8, atol=1e-12)


def test_memory_that_ends_between_two_micro_batches_leaves_no_gradient_behind(policy: Policy, sampled: Sampled) -> None:
    groups, row = sampled(policy), ONE_UPDATE["gspo"]
    whole = gradients(policy, groups, row, 1)
    learner = make(policy, row, GradientRecorder)
    (batch,) = learner.annotate(make_batches(groups, row, 1))
    plain, calls = policy_objective(row), []

    def exhausted(*inputs: object) -> object:
        calls.append(inputs)
        if len(calls) == 3:
            raise MemoryError
        return plain(*inputs)  # type: ignore[arg-type]

    with pytest.raises(OutOfMemoryError):
        learner.update(batch, exhausted)  # type: ignore[arg-type]
    learner.update(batch, plain)
    assert isinstance(learner, GradientRecorder)
    for name, gradient in whole.items():
        torch.testing.assert_close(learner.gradients[name], gradient, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_an_unchanged_policy_has_a_ratio_of_exactly_one(dtype: str, sampled: Sampled) -> None:
    policy = load_policy(config.Model(name="random-dense", dtype=dtype))  # type: ignore[arg-type]
    row = PRESETS["gspo"].model_copy(update={"updates_per_step": 2})
    learner = make(policy, row)
    second = learner.annotate(make_batches(sampled(policy), row, 64))[1]
    assert second.old_logprob_N is not None
    stats = learner.update(second, policy_objective(row))
    assert stats.tally.log_ratio_tokens_square == 0.0
    assert stats.tally.clip_rows == 0.0


def test_after_an_update_the_ratio_is_no_longer_one(policy: Policy, sampled: Sampled) -> None:
    row = PRESETS["gspo"]
    first, *later = run_step(make(policy, row), sampled(policy), row)
    assert first.tally.std_log_ratio_rows == 0.0
    assert all(stats.tally.log_ratio_rows_square > 0 for stats in later)
    assert later[-1].tally.clip_rows > 0, "at this step size the paper's band must bind"


def test_the_engine_and_the_trainer_agree_on_what_was_sampled(policy: Policy, sampled: Sampled) -> None:
    """huggingface/trl#4159: a temperature missing on one side doubles the first ratio."""
    row = PRESETS["gspo"]
    groups = sampled(policy, temperature=0.6)
    for temperature, agrees in ((0.6, True), (1.0, False)):
        learner = make(load_policy(config.Model(name="random-dense", dtype="float64")), row, temperature=temperature)
        parity = run_step(learner, groups, row)[0].parity.largest
        assert (parity < 1e-4) is agrees


def test_parity_covers_the_tokens_of_all_updates(policy: Policy, sampled: Sampled) -> None:
    row = PRESETS["gspo"]
    stats = run_step(make(policy, row), sampled(policy), row)
    assert [s.parity.tokens for s in stats] == [s.trained_tokens for s in stats]
    assert max(s.parity.largest for s in stats) < 1e-4


def test_small_updates_are_kept_in_the_masters() -> None:
    """areal-project/AReaL#1634: in bfloat16 a weight of 1.0 never moves by 1e-4."""
    policy = load_policy(config.Model(name="random-dense", dtype="bfloat16"))
    learner = make(policy, PRESETS["gspo"], max_new_tokens=4)
    name = next(name for name in learner.masters if name.endswith("norm.weight"))
    learner.settings = config.Optimizer(learning_rate=1e-4, max_grad_norm=None)
    learner._set_learning_rate()
    assert learner.masters[name][0] == 1.0
    for _ in range(100):
        for p in learner.masters.values():
            p.grad = torch.ones_like(p)
        learner._step(Tally())
    assert float(learner.masters[name].detach()[0]) == pytest.approx(0.99, abs=1e-5)
    assert policy.model.get_parameter(name).dtype == torch.bfloat16
    assert learner.change().changed == 1.0
    assert torch.tensor(1.0).bfloat16() - torch.tensor(1e-4).bfloat16() == 1.0


def test_a_gradient_that_reaches_nothing_stops_the_run(policy: Policy, sampled: Sampled) -> None:
    """Goekdeniz-Guelmez/mlx-lm-lora#55: sixty iterations in which nothing changed."""
    policy.model.requires_grad_(False)
    policy.model.register_parameter("unused", torch.nn.Parameter(torch.ones(3, dtype=torch.float64)))
    row = ONE_UPDATE["gspo"]
    with pytest.raises(RunError, match="no trainable weight changed"):
        run_step(make(policy, row), sampled(policy), row)


def test_no_trainable_parameter_at_all_is_refused(policy: Policy) -> None:
    policy.model.requires_grad_(False)
    with pytest.raises(RunError, match="trainable"):
        make(policy, PRESETS["gspo"])


def test_a_value_that_is_not_finite_stops_the_step_with_its_row(policy: Policy, sampled: Sampled) -> None:
    groups = sampled(policy)
    with torch.no_grad():
        policy.model.model.layers[0].mlp.down_proj.weight.fill_(float("nan"))
    with pytest.raises(RunError, match=r"prompt row \d+ .* answer \d+"):
        run_step(make(policy, PRESETS["gspo"]), groups, PRESETS["gspo"])


def test_the_learning_rate_counts_updates() -> None:
    """allenai/open-instruct#1523: a schedule in batches decays in half the time."""
    linear = config.Optimizer(schedule="linear", warmup_updates=2)
    rates = [schedule(linear, update, 8) for update in range(9)]
    assert rates[:3] == [0.5, 1.0, 1.0]
    assert rates[8] == 0.0
    assert all(a > b for a, b in pairwise(rates[2:]))
    assert schedule(config.Optimizer(schedule="cosine"), 4, 8) == pytest.approx(0.5)


def kl_row(**keys: object) -> Algorithm:
    return Algorithm.model_validate({**PRESETS["gspo"].model_dump(), "updates_per_step": 1, **keys})


@pytest.mark.parametrize("where", [{"kl_in": "loss"}, {"kl_in": "reward", "kl_estimator": "k1"}])
def test_the_kl_from_the_reference_is_zero_at_the_start(
    where: dict[str, object], policy: Policy, sampled: Sampled
) -> None:
    reference = load_policy(config.Model(name="random-dense", dtype="float64")).model.requires_grad_(False)
    row = kl_row(kl_coefficient=0.1, **where)
    groups = sampled(policy)
    learner = make(policy, row, reference=reference)
    (first,) = run_step(learner, groups, row)
    (second,) = run_step(learner, groups, row)
    assert first.tally.kl == pytest.approx(0, abs=1e-12)
    assert second.tally.kl > 1e-9


def test_kl_in_the_reward_is_taken_off_before_the_baseline(policy: Policy, sampled: Sampled) -> None:
    other = load_policy(config.Model(name="random-dense", dtype="float64")).model.requires_grad_(False)
    with torch.no_grad():
        other.model.embed_tokens.weight.mul_(1.5)
    groups = sampled(policy)
    row = kl_row(kl_coefficient=0.5, kl_in="reward", kl_estimator="k1", advantage="group_mean", name="mine")
    (batch,) = make(policy, row, reference=other).annotate(make_batches(groups, row, 1000))
    assert batch.old_logprob_N is not None
    assert batch.reference_logprob_N is not None
    gap_N = batch.old_logprob_N - batch.reference_logprob_N
    expected = batch.reward_R.clone()
    for s, r in enumerate(batch.rollout_S.tolist()):
        expected[r] -= 0.5 * gap_N[batch.sequence_N == s].sum()
    for g in range(4):
        expected[batch.group_R == g] -= expected[batch.group_R == g].mean()
    torch.testing.assert_close(batch.advantage_R, expected, rtol=1e-9, atol=1e-9)


def test_a_batch_baseline_spans_the_updates_of_a_step(policy: Policy, sampled: Sampled) -> None:
    row = Algorithm(
        name="mine",
        ratio="token",
        gate="none",
        aggregation="token_mean",
        advantage="batch_mean_std",
        updates_per_step=2,
    )
    batches = make(policy, row).annotate(make_batches(sampled(policy), row, 1000))
    together = torch.cat([b.advantage_R for b in batches if b.advantage_R is not None])
    assert len(batches) == 2
    assert float(together.mean()) == pytest.approx(0, abs=1e-12)
    assert float(together.std()) == pytest.approx(1)
