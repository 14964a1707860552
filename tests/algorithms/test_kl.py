"""Which way each KL estimator pulls, in exact expectation and in a toy run; and where the loss takes it from."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from cases import evaluate, random_batch, variant
from torch import Tensor

from gspo.algorithms.advantages import advantages, token_weights
from gspo.algorithms.losses import PolicyInputs, kl_term, policy_loss
from gspo.presets import Algorithm


@pytest.mark.parametrize(("estimator", "slope"), [("k1", 0.0), ("k2", 0.19775), ("k3", 0.4), ("k3_corrected", 0.19775)])
def test_gradient_in_expectation(estimator: str, slope: float) -> None:
    """OpenRLHF/OpenRLHF#1309: two tokens, p = [.9, .1], reference [.5, .5]; the reverse KL has 0.19775 at the first logit."""
    logit_V = torch.tensor([0.9, 0.1], dtype=torch.float64).log().requires_grad_()
    logprob_V = logit_V.log_softmax(0)
    reference_V = torch.tensor([0.5, 0.5], dtype=torch.float64).log()
    drawn_V = logprob_V.detach()
    expected = (drawn_V.exp() * kl_term(estimator, logprob_V, drawn_V, reference_V)).sum()
    (grad_V,) = torch.autograd.grad(expected, logit_V)
    assert float(grad_V[0]) == pytest.approx(slope, abs=5e-6)


def test_the_corrected_gradient_stays_right_off_policy() -> None:
    """Tokens drawn from an older policy: only k3_corrected still has the gradient of the reverse KL of the new one."""
    reference_V = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64).log()
    old_V = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64).log()
    logit_V = torch.tensor([0.3, -0.2, 0.4], dtype=torch.float64, requires_grad=True)

    def gradient(of: Tensor) -> list[float]:
        return torch.autograd.grad(of, logit_V, retain_graph=True)[0].tolist()

    logprob_V = logit_V.log_softmax(0)
    true = gradient((logprob_V.exp() * (logprob_V - reference_V)).sum())
    for estimator in ("k2", "k3", "k3_corrected"):
        got = gradient((old_V.exp() * kl_term(estimator, logprob_V, old_V, reference_V)).sum())
        assert (got == pytest.approx(true, abs=1e-12)) == (estimator == "k3_corrected")


REWARD_V = torch.tensor([1.0, 0.5, 0.0, 0.0], dtype=torch.float64)
REFERENCE_V = torch.tensor([0.1, 0.4, 0.3, 0.2], dtype=torch.float64).log()


def kl_after_training(row: Algorithm, steps: int = 40, answers: int = 256) -> float:
    """KL(policy || reference) of a four-token softmax policy that starts at the reference; two updates on each draw."""
    generator = torch.Generator().manual_seed(0)
    logit_V = REFERENCE_V.clone().requires_grad_()
    sequence_N = torch.arange(answers)
    weight_N = token_weights(
        row, length_S=torch.ones(answers), sequence_N=sequence_N, sequences=answers, tokens=answers, max_new_tokens=1
    )  # fmt: skip
    for _ in range(steps):
        old_V = logit_V.detach().log_softmax(0)
        drawn_N = torch.multinomial(old_V.exp(), answers, replacement=True, generator=generator)
        advantage_S = advantages(row, REWARD_V[drawn_N], torch.zeros(answers, dtype=torch.int64))
        for _ in range(2):
            inputs = PolicyInputs(
                logprob_N=logit_V.log_softmax(0)[drawn_N],
                old_logprob_N=old_V[drawn_N],
                rollout_logprob_N=old_V[drawn_N],
                reference_logprob_N=REFERENCE_V[drawn_N],
                advantage_N=advantage_S,
                weight_N=weight_N,
                sequence_N=sequence_N,
                sequences=answers,
            )
            loss, _ = policy_loss(inputs, row)
            (grad_V,) = torch.autograd.grad(loss, logit_V)
            logit_V = (logit_V - 0.5 * grad_V).detach().requires_grad_()
    logprob_V = logit_V.detach().log_softmax(0)
    return float((logprob_V.exp() * (logprob_V - REFERENCE_V)).sum())


@pytest.mark.parametrize("estimator", ["k3_corrected", "k2", "k3"])
def test_a_larger_coefficient_gives_a_smaller_divergence(estimator: str) -> None:
    """Reported the other way round for k1 in the loss (huggingface/trl#4967)."""
    plain = variant("grpo", advantage="group_mean", name="toy")
    held = [
        variant("grpo", advantage="group_mean", name="toy", kl_coefficient=beta, kl_estimator=estimator)
        for beta in (0.3, 1.0, 3.0)
    ]
    measured = [kl_after_training(row) for row in (plain, *held)]
    assert measured == sorted(measured, reverse=True)
    assert measured[0] > 1.5 * measured[1] > 3 * measured[3]


def test_corrected_estimator_reaches_the_known_optimum() -> None:
    """The optimum of E[r] - beta KL is the reference tilted by exp(r / beta)."""
    tilted_V = (REFERENCE_V + REWARD_V / 0.5).log_softmax(0)
    optimum = float((tilted_V.exp() * (tilted_V - REFERENCE_V)).sum())
    row = variant("grpo", advantage="group_mean", name="toy", kl_coefficient=0.5)
    assert kl_after_training(row, steps=120, answers=1024) == pytest.approx(optimum, rel=0.1)


# ------------------------------------------------------------------------------ in the loss


def test_kl_is_added_with_the_weights_of_the_policy_term() -> None:
    """Row means for GSPO, whose KL is of tokens all the same: the ratio in k3_corrected is the token's, not the sequence's."""
    batch = random_batch([3, 5, 2], seed=4)
    plain, with_kl = evaluate(batch, variant("gspo")), evaluate(batch, variant("gspo", kl_coefficient=0.25))
    d, ratio = batch.logprob - batch.reference, (batch.logprob - batch.old).exp()
    n = batch.mask.sum(1, keepdim=True)
    k3 = ratio * ((-d).exp() - 1 + d)
    expected = float((torch.where(batch.mask, k3, 0.0) / (3 * n)).sum())
    assert with_kl.loss - plain.loss == pytest.approx(0.25 * expected, abs=1e-12)
    added = torch.where(batch.mask, 0.25 * ratio * d / (3 * n), 0.0)
    assert float((with_kl.grad - plain.grad - added).abs().max()) <= 1e-12


def test_kl_in_the_reward_leaves_the_loss_alone() -> None:
    batch = random_batch([3, 5, 2], seed=4)
    row = variant("grpo", kl_coefficient=0.25, kl_estimator="k1", kl_in="reward")
    assert evaluate(batch, row).loss == evaluate(batch, variant("grpo")).loss


def test_kl_reaches_rows_that_the_gate_or_the_advantage_left_without_gradient() -> None:
    batch = random_batch([3, 5, 2], seed=4)
    still = replace(batch, advantage=torch.zeros_like(batch.advantage))
    assert not evaluate(still, variant("gspo")).grad.any()
    assert evaluate(still, variant("gspo", kl_coefficient=0.1)).grad[batch.mask].all()


def test_a_kl_term_without_a_reference_is_refused() -> None:
    batch = replace(random_batch([2, 2], seed=0), reference=None)
    with pytest.raises(ValueError, match="needs reference_logprob_N"):
        evaluate(batch, variant("gspo", kl_coefficient=0.1))
