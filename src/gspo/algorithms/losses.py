"""The policy loss of every algorithm, as one weighted sum over trained tokens, and what it did to them.

In: log-probabilities, advantages and weights of a micro-batch of whole sequences, and a row of
`presets.py`. Out: a scalar to minimise (minus the papers' objective), and a Tally. `learner.py` calls it.

    anchor -> log ratio -> level of the ratio -> gate -> mismatch correction -> + KL -> sum of weight_N * term_N

The weights carry the aggregation and the counts of the whole update (`advantages.token_weights`), so the
sum over micro-batches and ranks is the update's gradient, however it was split, packed or ordered. Each choice is
a table of functions; `gates.py` holds the largest.

Suffixes: _N trained tokens (packed), _S sequences of the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from gspo.algorithms.gates import GATES, PolicyInputs
from gspo.algorithms.segments import segment_mean, segment_sum, spread, widened
from gspo.algorithms.tally import Tally, tally
from gspo.presets import Algorithm

__all__ = ["PolicyInputs", "Tally", "correction_weight", "kl_term", "policy_loss"]


def policy_loss(inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tally]:
    """Loss of a micro-batch, a scalar with gradient to `inputs.logprob_N`, and its tally.

    Computed in float32, or in float64 if `logprob_N` is float64; narrower types are widened first.

    Raises:
        ValueError: the row has a KL term in its loss and `reference_logprob_N` is None.
    """
    inputs = _widened(inputs)
    anchor_N = _ANCHORS[row.anchor](inputs)
    token_log_ratio_N = inputs.logprob_N - anchor_N
    log_ratio_N = _LEVELS[row.ratio](token_log_ratio_N, inputs)
    term_N, lost_N = GATES[row.gate](log_ratio_N, inputs, row)
    correction_N = correction_weight(
        row, inputs.old_logprob_N, inputs.rollout_logprob_N, inputs.sequence_N, inputs.sequences
    )
    term_N = correction_N * term_N
    if row.kl_coefficient and row.kl_in == "loss":
        if inputs.reference_logprob_N is None:
            raise ValueError(f"{row.name}: kl_coefficient={row.kl_coefficient:g} needs reference_logprob_N")
        kl_N = kl_term(row.kl_estimator, inputs.logprob_N, anchor_N, inputs.reference_logprob_N)
        term_N = term_N + row.kl_coefficient * kl_N
    measured = tally(inputs, token_log_ratio_N=token_log_ratio_N, lost_N=lost_N, dropped_N=correction_N == 0)
    return (inputs.weight_N * term_N).sum(), measured


def _widened(inputs: PolicyInputs) -> PolicyInputs:
    """All floats in the dtype of the widened `logprob_N`; all but it without gradient."""
    logprob_N = widened(inputs.logprob_N)

    def like(x_N: Tensor) -> Tensor:
        return x_N.detach().to(logprob_N.dtype)

    reference_N = inputs.reference_logprob_N
    return replace(
        inputs,
        logprob_N=logprob_N,
        old_logprob_N=like(inputs.old_logprob_N),
        rollout_logprob_N=like(inputs.rollout_logprob_N),
        reference_logprob_N=None if reference_N is None else like(reference_N),
        advantage_N=like(inputs.advantage_N),
        weight_N=like(inputs.weight_N),
    )


_ANCHORS: dict[str, Callable[[PolicyInputs], Tensor]] = {
    "old": lambda inputs: inputs.old_logprob_N,
    "rollout": lambda inputs: inputs.rollout_logprob_N,
}

# ------------------------------------------------------------------------------ level of the ratio


def _sequence(log_ratio_N: Tensor, inputs: PolicyInputs) -> Tensor:
    """log s of GSPO, arXiv 2507.18071 eq. 7, at each token of its row. No clamp: one would silence the gradient."""
    return spread(segment_mean(log_ratio_N, inputs.sequence_N, inputs.sequences), inputs.sequence_N)


def _sequence_token(log_ratio_N: Tensor, inputs: PolicyInputs) -> Tensor:
    """log of sg[s] * pi / sg[pi], arXiv 2507.18071 eq. 14: the sequence's value with the token's gradient."""
    return _sequence(log_ratio_N, inputs).detach() + (log_ratio_N - log_ratio_N.detach())


def _sequence_product(log_ratio_N: Tensor, inputs: PolicyInputs) -> Tensor:
    return spread(segment_sum(log_ratio_N, inputs.sequence_N, inputs.sequences), inputs.sequence_N)


_LEVELS: dict[str, Callable[[Tensor, PolicyInputs], Tensor]] = {
    "token": lambda log_ratio_N, inputs: log_ratio_N,
    "sequence": _sequence,
    "sequence_token": _sequence_token,
    "sequence_product": _sequence_product,
}

# ------------------------------------------------------------------------------ mismatch correction


def _truncate(ratio_N: Tensor, row: Algorithm) -> Tensor:
    assert row.correction_band is not None
    return ratio_N.clamp(max=row.correction_band[-1])


def _inside(ratio_N: Tensor, row: Algorithm) -> Tensor:
    """True inside the band, edges included."""
    assert row.correction_band is not None
    low, high = row.correction_band[0], row.correction_band[-1]
    return (ratio_N >= low) & (ratio_N <= high)


def _mask(ratio_N: Tensor, row: Algorithm) -> Tensor:
    return torch.where(_inside(ratio_N, row), ratio_N, 0.0)


def _keep(ratio_N: Tensor, row: Algorithm) -> Tensor:
    return _inside(ratio_N, row).to(ratio_N.dtype)


def _token_ratio(log_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    return log_N.exp()


def _product_ratio(log_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    return spread(segment_sum(log_N, sequence_N, sequences).exp(), sequence_N)


def _geometric_ratio(log_N: Tensor, sequence_N: Tensor, sequences: int) -> Tensor:
    return spread(segment_mean(log_N, sequence_N, sequences).exp(), sequence_N)


_CORRECTIONS: dict[str, tuple[Callable[[Tensor, Tensor, int], Tensor], Callable[[Tensor, Algorithm], Tensor]]] = {
    "none": (_token_ratio, lambda ratio_N, row: torch.ones_like(ratio_N)),
    "token_truncate": (_token_ratio, _truncate),
    "token_mask": (_token_ratio, _mask),
    "sequence_geometric_mask": (_geometric_ratio, _keep),
    "sequence_product_truncate": (_product_ratio, _truncate),
    "sequence_product_mask": (_product_ratio, _mask),
}


@torch.no_grad()
def correction_weight(
    row: Algorithm, old_logprob_N: Tensor, rollout_logprob_N: Tensor, sequence_N: Tensor, sequences: int
) -> Tensor:
    """Weight of each token for the mismatch rho = old/rollout of trainer and engine, [N], without gradient.

    Truncated (TIS), or rho inside correction_band and 0 outside (IcePop, arXiv 2510.18855), per token
    or for the product over the sequence; or 1 or 0 for whole sequences by the geometric mean. 1 for correction=none.
    """
    ratio, weigh = _CORRECTIONS[row.correction]
    return weigh(ratio(widened(old_logprob_N) - widened(rollout_logprob_N), sequence_N, sequences), row)


# ------------------------------------------------------------------------------ KL


def _k1(log_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    return log_N


def _k2(log_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    return log_N.square() / 2


def _k3(log_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    return torch.expm1(-log_N) + log_N


def _k3_corrected(log_N: Tensor, log_ratio_N: Tensor) -> Tensor:
    return log_ratio_N.exp() * _k3(log_N, log_ratio_N)


_KL: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"k1": _k1, "k2": _k2, "k3": _k3, "k3_corrected": _k3_corrected}


def kl_term(estimator: str, logprob_N: Tensor, old_logprob_N: Tensor, reference_logprob_N: Tensor) -> Tensor:
    """Estimate of KL(pi || reference) at each sampled token, [N], with gradient to `logprob_N`.

    With d = log pi - log reference: k1 = d, k2 = d²/2, k3 = e^-d - 1 + d, and k3_corrected = (pi/old) k3 with the token
    ratio inside the gradient, which makes it (pi/old) d, that of the reverse KL (DeepSeek-V3.2, arXiv 2512.02556).
    The ratio is the token's even where the algorithm's is the sequence's: another would lose that identity.

    Args:
        old_logprob_N: of the policy that the tokens are taken to come from; `policy_loss` passes the row's anchor.
    """
    logprob_N = widened(logprob_N)
    log_N = logprob_N - widened(reference_logprob_N).detach()
    return _KL[estimator](log_N, logprob_N - widened(old_logprob_N).detach())
