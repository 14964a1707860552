"""A critic in the trainer: its gradient however the batch is cut, what it is given, and that it learns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import norms
from gspo import PRESETS, config
from gspo.algorithms.values import explained_variance, gae
from gspo.batch import Batch, make_batches
from gspo.credit import token_rewards
from gspo.critic import Critic as OpenCritic
from gspo.critic import ValueLearner
from gspo.critic_config import Critic
from gspo.learner import Learner
from gspo.models.load import Policy, load_policy
from gspo.models.values import ValueHead, install_value_head
from gspo.objectives import policy_objective, value_objective
from gspo.presets import Algorithm
from gspo.types import Group, Prompt, Reward, Rollout, Segment, Stop

Sampled = Callable[..., list[Group]]
PPO = PRESETS["ppo"].model_copy(update={"updates_per_step": 1})
FLOAT64 = config.Model(name="random-dense", dtype="float64")
PLAIN = Critic(whiten=False)


class Recorder:
    """Keeps the gradients that the optimizer would have been given."""

    gradients: dict[str, Tensor]
    masters: dict[str, Any]
    optimizer: Any

    def _step(self, tally: object) -> float:
        self.gradients = {name: p.grad.clone() for name, p in self.masters.items() if p.grad is not None}
        self.optimizer.zero_grad()
        return 1.0


class RecordingLearner(Recorder, Learner):
    pass


class RecordingValueLearner(Recorder, ValueLearner):
    pass


def arguments(model: Any, row: Algorithm, dtype: torch.dtype = torch.float64, rate: float = 1e-3) -> dict[str, Any]:
    settings = config.Optimizer(learning_rate=rate)
    return dict(
        model=model, row=row, settings=settings, temperature=1.0, max_new_tokens=6, total_updates=8, compute_dtype=dtype
    )


def critic(kind: type[ValueLearner] = ValueLearner, model: config.Model = FLOAT64, rate: float = 1e-3) -> ValueLearner:
    """One with a head that is not 0, so that gradients reach its layers."""
    loaded = load_policy(model)
    norms.in_float64(loaded.model)
    head = install_value_head(loaded.model)
    with torch.no_grad():
        head.weight.copy_(torch.linspace(-0.2, 0.3, head.in_features))
    return kind(**arguments(loaded.model, PPO, loaded.compute_dtype, rate))


def annotated(policy: Policy, groups: list[Group], budget: int, settings: Critic = PLAIN) -> Batch:
    learner = Learner(**arguments(policy.model, PPO), critic=settings, values=critic().predict)
    (batch,) = learner.annotate(make_batches(groups, PPO, budget))
    return batch


def close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def value_gradients(policy: Policy, groups: list[Group], budget: int) -> tuple[float, dict[str, Tensor]]:
    learner = critic(RecordingValueLearner)
    batch = annotated(policy, groups, budget)
    assert batch.return_N is not None
    stats = learner.update(batch, value_objective(0.05))
    assert isinstance(learner, RecordingValueLearner)
    return stats.loss, learner.gradients


def test_the_critics_gradient_does_not_depend_on_micro_batches_or_order(policy: Policy, sampled: Sampled) -> None:
    groups = sampled(policy)
    loss, whole = value_gradients(policy, groups, 10_000)
    assert all(float(gradient.abs().max()) > 0 for gradient in whole.values())
    shuffled = [replace(g, rollouts=g.rollouts[::-1]) for g in groups[::-1]]
    for pieces in (value_gradients(policy, groups, 1), value_gradients(policy, shuffled, 60)):
        assert pieces[0] == pytest.approx(loss, rel=1e-12)
        close(pieces[1], whole)


def test_the_critics_gradient_is_that_of_one_answer_at_a_time(policy: Policy, sampled: Sampled) -> None:
    """By the backbone's own hidden states and a plain mean square, with none of our packing, head or loss."""
    groups = sampled(policy)
    _, found = value_gradients_without_clip(policy, groups)
    learner = critic()
    model, head = learner.model, learner.model.get_output_embeddings()
    model.set_attn_implementation("sdpa")  # type: ignore[operator]
    values, returns = [], []
    for g in groups:
        for r in g.rollouts:
            assert r.reward is not None
            ids = torch.cat([torch.from_numpy(g.prompt.token_ids), torch.from_numpy(r.segments[0].token_ids)])
            start = len(g.prompt.token_ids)
            hidden = model.model(input_ids=ids[None], use_cache=False).last_hidden_state[0, start - 1 : -1]
            value = hidden @ head.weight[0] + head.bias[0]
            reward = torch.zeros(len(value), dtype=torch.float64)
            reward[-1] = r.reward.value
            values.append(value)
            returns.append(gae(reward, value.detach(), torch.tensor([len(value)]), gamma=1.0, gae_lambda=0.95)[1])
    (torch.cat(values) - torch.cat(returns)).square().mean().div(2).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=1e-8, atol=1e-12, msg=name)


def value_gradients_without_clip(policy: Policy, groups: list[Group]) -> tuple[float, dict[str, Tensor]]:
    learner = critic(RecordingValueLearner)
    loss = learner.update(annotated(policy, groups, 50), value_objective(None)).loss
    assert isinstance(learner, RecordingValueLearner)
    return loss, learner.gradients


@pytest.mark.parametrize("budget", [1, 60])
def test_a_shared_critics_gradient_does_not_depend_on_micro_batches(
    budget: int, policy: Policy, sampled: Sampled
) -> None:
    groups, settings = sampled(policy), Critic(backbone="shared", value_coefficient=0.7)

    def of(tokens: int, coefficient: float = 0.7) -> dict[str, Tensor]:
        head = ValueHead(64, dtype=torch.float64, device=torch.device("cpu"))
        torch.nn.init.constant_(head.weight, 0.1)
        rule = settings.model_copy(update={"value_coefficient": coefficient})
        learner = RecordingLearner(**arguments(policy.model, PPO), critic=rule, value_head=head)
        (batch,) = learner.annotate(make_batches(groups, PPO, tokens))
        learner.update(batch, policy_objective(PPO))
        return learner.gradients

    whole = of(10_000)
    close(of(budget), whole)
    heavier = of(10_000, 1.4)
    torch.testing.assert_close(heavier["value_head.weight"], 2 * whole["value_head.weight"])
    assert not torch.allclose(
        heavier["model.layers.0.mlp.down_proj.weight"], whole["model.layers.0.mlp.down_proj.weight"]
    )


@pytest.mark.parametrize("value_clip", [1e-9, None])
@pytest.mark.parametrize("backbone", ["separate", "shared"])
def test_a_value_that_has_left_the_clip_has_no_gradient(
    backbone: str, value_clip: float | None, policy: Policy, sampled: Sampled
) -> None:
    """What `critic.value_clip` says is what either critic's update does."""
    settings = Critic.model_validate({"backbone": backbone, "value_clip": value_clip, "whiten": False})
    batches, own = make_batches(sampled(policy), PPO, 100), critic(rate=1e-6)
    head = ValueHead(64, dtype=torch.float64, device=torch.device("cpu"))
    given = {"values": own.predict} if backbone == "separate" else {"value_head": head}
    learner = Learner(**arguments(policy.model, PPO, rate=1e-6), critic=settings, **given)
    (batch,) = learner.annotate(batches)

    def clipped() -> float:
        if backbone == "separate":
            return OpenCritic(settings, head, own, "").learn(batch).tally.clip_values
        return learner.update(batch, policy_objective(PPO)).tally.clip_values

    assert clipped() == 0, "no value has moved yet"
    assert (clipped() > 0.5) == (value_clip is not None), "by now they have moved a little, towards their returns"


def test_the_policy_has_no_part_in_a_separate_critic(policy: Policy, sampled: Sampled) -> None:
    groups = sampled(policy)
    before = {name: p.clone() for name, p in policy.model.named_parameters()}
    own = critic()
    learner = Learner(**arguments(policy.model, PPO), critic=PLAIN, values=own.predict)
    (batch,) = learner.annotate(make_batches(groups, PPO, 100))
    own.update(batch, value_objective(None))
    assert all(torch.equal(before[name], p) for name, p in policy.model.named_parameters())
    assert all(p.grad is None for p in policy.model.parameters())
    values = own.predict(batch)
    learner.update(batch, policy_objective(PPO))
    assert torch.equal(own.predict(batch), values)


# ------------------------------------------------------------------------------ what it is given


def answer(index: int, reward: float, mask: list[int], stop: Stop = Stop.EOS) -> Rollout:
    policy = np.array(mask, dtype=bool)
    segment = Segment(np.arange(10, 10 + len(mask)), policy, np.where(policy, -1.0, 0.0).astype(np.float32))
    return Rollout(index, (segment,), "", stop, (0, 0), Reward(reward))


def group(*answers: Rollout) -> Group:
    return Group(
        Prompt(0, "", np.array([2, 5, 2, 6]), {}), 0, answers
    )  # 2 is the end token: it stands in the prompt too


def batch_of(*answers: Rollout, row: Algorithm = PPO) -> Batch:
    (batch,) = make_batches([group(*answers)], row, 1000)
    return batch


def test_the_score_stands_at_the_last_token_that_the_policy_wrote() -> None:
    """P22, huggingface/trl#3750: a score at the token behind the end was lost. Here a tool has the last word."""
    batch = batch_of(answer(0, 1.0, [1, 1, 1, 0, 0]), answer(1, 0.5, [1, 0, 1]))
    assert token_rewards(batch, PPO, 0.0).tolist() == [0.0, 0.0, 1.0, 0.0, 0.5]


def test_answers_that_do_not_end_are_penalised_once() -> None:
    """P22, huggingface/trl#6802: the penalty looked for the end token, which the prompt has too, and never came."""
    batch = batch_of(answer(0, 1.0, [1, 1, 1], Stop.LENGTH), answer(1, 1.0, [1, 1]), answer(2, 0.0, [1], Stop.LENGTH))
    assert token_rewards(batch, PPO, 0.25).tolist() == [0, 0, 0.75, 0, 1.0, -0.25]
    assert batch.reward_R.tolist() == [1.0, 1.0, 0.0], "the reward itself is what the function said"


def test_the_penalty_is_in_the_advantage(policy: Policy) -> None:
    given = [group(answer(0, 1.0, [1, 1], Stop.LENGTH), answer(1, 1.0, [1, 1]))]
    settings = Critic(whiten=False, gae_lambda=1.0, end_penalty=0.25)
    learner = Learner(**arguments(policy.model, PPO), critic=settings, values=lambda b: torch.zeros(len(b.target_N)))
    (batch,) = learner.annotate(make_batches(given, PPO, 1000))
    assert batch.advantage_N is not None
    assert batch.advantage_N.tolist() == [0.75, 0.75, 1.0, 1.0]


def test_the_kl_is_taken_off_where_it_arises() -> None:
    row = PPO.model_copy(update={"kl_coefficient": 0.1, "kl_in": "reward", "kl_estimator": "k1"})
    batch = batch_of(answer(0, 1.0, [1, 1]), answer(1, 0.0, [1]), row=row)
    batch = replace(
        batch, old_logprob_N=torch.tensor([-1.0, -2.0, -3.0]), reference_logprob_N=torch.tensor([-2.0, -1.0, -3.0])
    )
    assert token_rewards(batch, row, 0.0).tolist() == pytest.approx([-0.1, 0.1 + 1.0, 0.0])


def test_tokens_of_a_tool_cost_no_decay(policy: Policy) -> None:
    """P22: between two policy tokens lie many of a tool, and one step of decay."""
    groups = [group(answer(0, 1.0, [1, *[0] * 9, 1]), answer(1, 1.0, [1, 1]))]
    settings = Critic(whiten=False, gamma=0.5, gae_lambda=1.0)
    learner = Learner(**arguments(policy.model, PPO), critic=settings, values=lambda b: torch.zeros(len(b.target_N)))
    (batch,) = learner.annotate(make_batches(groups, PPO, 1000))
    assert batch.advantage_N is not None
    assert batch.advantage_N.tolist() == [0.5, 1.0, 0.5, 1.0]


def test_groups_that_agree_are_kept_and_one_answer_is_enough(policy: Policy) -> None:
    batches = make_batches([group(answer(0, 1.0, [1, 1]))], PPO, 1000)
    assert [len(b.target_N) for b in batches] == [2]
    settings = Critic(whiten=False)
    learner = Learner(**arguments(policy.model, PPO), critic=settings, values=lambda b: torch.zeros(len(b.target_N)))
    (batch,) = learner.annotate(batches)
    stats = learner.update(batch, policy_objective(PPO))
    assert stats.grad_norm > 0
    assert batch.advantage_R is not None
    assert batch.advantage_R.tolist() == [pytest.approx((0.95 + 1.0) / 2)]


def test_advantages_are_whitened_over_the_step(policy: Policy, sampled: Sampled) -> None:
    row = PPO.model_copy(update={"updates_per_step": 2})
    learner = Learner(**arguments(policy.model, row), critic=Critic(), values=critic().predict)
    batches = learner.annotate(make_batches(sampled(policy), row, 1000))
    together = torch.cat([b.advantage_N for b in batches if b.advantage_N is not None])
    assert len(batches) == 2
    assert float(together.mean()) == pytest.approx(0, abs=1e-12)
    assert float(together.std()) == pytest.approx(1)


def test_answers_left_out_by_their_length_have_no_part_in_the_whitening(policy: Policy) -> None:
    row = PPO.model_copy(update={"mask_truncated": True})
    given = [answer(0, 1.0, [1, 1]), answer(1, 9.0, [1, 1, 1], Stop.LENGTH), answer(2, 0.0, [1, 1])]
    learner = Learner(**arguments(policy.model, row), critic=Critic(), values=lambda b: torch.zeros(len(b.target_N)))
    (batch,) = learner.annotate(make_batches([group(*given)], row, 1000))
    (without,) = learner.annotate(make_batches([group(given[0], given[2])], row, 1000))
    assert batch.advantage_N is not None
    assert without.advantage_N is not None
    torch.testing.assert_close(batch.advantage_N[batch.weight_N != 0], without.advantage_N)


# ------------------------------------------------------------------------------ learning


def test_a_critic_learns_what_comes_of_a_text(policy: Policy, sampled: Sampled) -> None:
    """The reward is a property of the prompt, so that it can be known from the first token on."""
    groups = [
        g.with_rewards([Reward(float(g.ordinal % 2)) for _ in g.rollouts])
        for g in sampled(policy, prompts=6, answers=4)
    ]
    batches = make_batches(groups, PPO, 1000)
    own = critic(rate=3e-3)
    learner = Learner(**arguments(policy.model, PPO), critic=Critic(whiten=False), values=own.predict)
    explained, losses = [], []
    for _ in range(40):
        (batch,) = learner.annotate(batches)
        assert batch.outcome_N is not None
        assert batch.value_N is not None
        explained.append(explained_variance(batch.outcome_N, batch.value_N))
        losses.append(own.update(batch, value_objective(None)).loss)
    assert explained[0] is not None
    assert explained[-1] is not None
    assert explained[0] < 0.1
    assert explained[-1] > 0.6
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", ["random-dense", "random-moe"])
def test_a_value_head_starts_at_0_and_is_float32_in_bfloat16(model: str, policy: Policy, sampled: Sampled) -> None:
    loaded = load_policy(config.Model(name=model, dtype="bfloat16"))
    install_value_head(loaded.model)
    own = ValueLearner(**arguments(loaded.model, PPO, loaded.compute_dtype))
    (batch,) = make_batches(sampled(policy), PPO, 64)
    values = own.predict(own.placed(batch))
    assert values.dtype == torch.float32
    assert values.tolist() == [0.0] * len(batch.target_N)
    assert own.master_weights()["lm_head.weight"].dtype == torch.float32
