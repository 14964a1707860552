"""The load-balancing loss: transformers' formula layer by layer, of the whole update however it is cut, off unless set."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from experts import MODES, ROW, learner_of, moe, sampled
from gspo.balance import load
from gspo.batch import make_batches
from gspo.models.attention import Packed
from gspo.models.heads import trained_logprobs
from gspo.models.routing import Routed, Routing, routers_of
from gspo.objectives import policy_objective
from gspo.stats import UpdateStats


def balanced(
    groups: Any, mode: str, budget: int, *, policy_loss: bool = False, **model: Any
) -> tuple[dict[str, Tensor], UpdateStats]:
    row = ROW.model_copy(update={"updates_per_step": 1, "load_balance": 0.5})
    learner = learner_of(moe(**model), mode, row)
    (batch,) = learner.annotate(make_batches(groups, row, budget))
    plain = policy_objective(learner.row)

    def nothing(logprob_N: Tensor, *rest: Any) -> Any:
        loss, tally = plain(logprob_N, *rest)
        return (loss if policy_loss else 0 * loss), tally

    stats = learner.update(batch, nothing)
    return learner.gradients, stats


def test_it_is_the_formula_of_transformers_in_each_layer() -> None:
    policy = moe()
    groups = sampled(policy)
    gradients, stats = balanced(groups, "off", 10_000)
    (batch,) = make_batches(groups, ROW.model_copy(update={"updates_per_step": 1}), 10_000)
    routers = routers_of(policy.model)
    assert routers is not None
    routing, (micro,) = Routing(routers, with_logits=True), batch.plan
    trained_logprobs(
        policy.model,
        tokens_T=batch.tokens_T,
        position_T=batch.position_T,
        layout=Routed(Packed(micro.lengths, parents=micro.parents), routing),
        source_N=batch.source_N,
        target_N=batch.target_N,
        temperature=1.0,
    )
    parts = [load_balancing_loss_func((logits,), 4, 2) for logits in routing.logits()]
    expected = torch.stack(parts).mean()  # type: ignore[arg-type]
    assert stats.imbalance == pytest.approx(float(expected.detach()), rel=1e-6)
    assert stats.imbalance > 2, "2 is even"
    (0.5 * expected).backward()
    # Kept as the optimizer is given them, which here is before they are clipped.
    norm = sum(float(p.grad.square().sum()) for p in policy.model.parameters() if p.grad is not None) ** 0.5
    assert stats.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, p in policy.model.named_parameters():
        if p.grad is not None and name in gradients:
            torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-7, msg=name)


@pytest.mark.parametrize("mode", MODES)
def test_the_cut_does_not_change_it(mode: str) -> None:
    groups = sampled(moe(), noise=1.0)
    whole, stats = balanced(groups, mode, 10_000, policy_loss=True)
    for budget in (1, 35):
        parts, again = balanced(groups, mode, budget, policy_loss=True)
        assert again.micro_batches > 1
        assert again.imbalance == pytest.approx(stats.imbalance, rel=1e-6)
        assert again.loss == pytest.approx(stats.loss, rel=1e-5)
        for name, gradient in whole.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(("mode", "source"), [("off", "old"), ("old", "old"), ("rollout", "rollout")])
def test_the_load_is_that_of_the_experts_in_use(mode: str, source: str) -> None:
    policy = moe()
    learner = learner_of(policy, mode, ROW.model_copy(update={"updates_per_step": 1, "load_balance": 0.5}))
    (batch,) = learner.annotate(make_batches(sampled(moe(), noise=1.0), learner.row, 10_000))
    assert batch.old_routes_TLK is not None
    assert batch.rollout_routes_TLK is not None
    routes_TLK = {"old": batch.old_routes_TLK, "rollout": batch.rollout_routes_TLK}[source].long()
    assert not torch.equal(batch.old_routes_TLK, batch.rollout_routes_TLK)
    found = load(routers_of(policy.model), learner.row, batch)
    counts = [torch.bincount(routes_TLK[:, layer].flatten(), minlength=4) for layer in range(2)]
    torch.testing.assert_close(found, torch.stack(counts) / len(routes_TLK))


def test_activations_computed_again_give_the_same() -> None:
    groups = sampled(moe())
    plain, _ = balanced(groups, "off", 60, policy_loss=True)
    saving, _ = balanced(groups, "off", 60, policy_loss=True, gradient_checkpointing=True)
    for name, gradient in plain.items():
        torch.testing.assert_close(saving[name], gradient, rtol=1e-9, atol=1e-12, msg=name)


def test_it_is_off_unless_it_is_set() -> None:
    """A checkpoint that asks for it (huggingface/trl reads its coefficient) changes nothing."""
    groups = sampled(moe())
    row = ROW.model_copy(update={"updates_per_step": 1})
    found = []
    for asks in (False, True):
        policy = moe()
        policy.model.config.output_router_logits, policy.model.config.router_aux_loss_coef = asks, 1.0
        learner = learner_of(policy, "off", row)
        (batch,) = learner.annotate(make_batches(groups, row, 1000))
        learner.update(batch, policy_objective(learner.row))
        found.append(learner.gradients)
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
