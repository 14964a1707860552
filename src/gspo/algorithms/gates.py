"""Gates: what stands between the importance ratio and the gradient.

In: the log ratio at the row's level, the inputs and the row. Out: the loss term of each token, and which tokens
have lost their gradient to the gate. `losses.py` calls it through the table `GATES`.

Two rules hold for all: the edge of a band is inside it, so that a tie keeps its full gradient (torch.minimum and clamp
would halve or keep it depending on the form); and a token is set aside before the exponential, never after, since an
overflow times a zero gradient is NaN.

Suffixes: _N trained tokens (packed).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from gspo.algorithms.segments import segment_mean, spread
from gspo.presets import Algorithm


@dataclass(frozen=True)
class PolicyInputs:
    """A micro-batch of whole sequences, packed: only tokens that the policy sampled, no padding and no mask."""

    logprob_N: Tensor
    """Under the policy that is trained, with gradient; temperature applied."""
    old_logprob_N: Tensor
    """Under the policy before the step, as the trainer computes it."""
    rollout_logprob_N: Tensor
    """Under the policy that sampled, as the engine computed it."""
    reference_logprob_N: Tensor | None
    """Under the starting policy; None if nothing needs it."""
    advantage_N: Tensor
    """The same for all tokens of a row, except with token and sequence_token ratios, where it may vary."""
    weight_N: Tensor
    """From `advantages.token_weights`, with the counts of the whole update."""
    sequence_N: Tensor
    """Row of each token, 0..sequences-1, numbered within the micro-batch."""
    sequences: int
    """Rows of the micro-batch; one without tokens is inert."""


Gate = Callable[[Tensor, PolicyInputs, Algorithm], tuple[Tensor, Tensor]]
"""(log_ratio_N, inputs, row) -> (term_N to minimise, lost_N: bool, where the gate took the whole gradient)."""


def _edges(row: Algorithm) -> tuple[float, float]:
    assert isinstance(row.clip_low, float), "bands.sized comes first"
    assert isinstance(row.clip_high, float)
    return row.clip_low, row.clip_high


def _by_sign(advantage_N: Tensor, positive: float, negative: float) -> Tensor:
    return torch.where(advantage_N > 0, positive, torch.full_like(advantage_N, negative))


def _ratio(log_ratio_N: Tensor, aside_N: Tensor) -> Tensor:
    """The ratio, and 1 without gradient where a token is set aside."""
    return torch.where(aside_N, 0.0, log_ratio_N).exp()


def _outside(log_ratio_N: Tensor, advantage_N: Tensor, row: Algorithm) -> Tensor:
    """Where PPO's clip takes the gradient: the ratio has left the band on the side that the advantage asks for."""
    low, high = _edges(row)
    ratio_N = log_ratio_N.detach().exp()
    return ((advantage_N > 0) & (ratio_N > 1 + high)) | ((advantage_N < 0) & (ratio_N < 1 - low))


def _none(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """r A, plain."""
    advantage_N = inputs.advantage_N
    still_N = advantage_N == 0
    return -_ratio(log_ratio_N, still_N) * advantage_N, torch.zeros_like(still_N)


def _clip(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """min(r A, clip(r) A), PPO eq. 7, GSPO eq. 5; with weight_cap at least weight_cap * A if A < 0 (arXiv 1912.09729)."""
    low, high = _edges(row)
    advantage_N = inputs.advantage_N
    lost_N = _outside(log_ratio_N, advantage_N, row)
    edge_N = _by_sign(advantage_N, 1 + high, 1 - low)
    if row.weight_cap is not None:
        beyond_N = (advantage_N < 0) & (log_ratio_N.detach().exp() > row.weight_cap)
        lost_N, edge_N = lost_N | beyond_N, torch.where(beyond_N, row.weight_cap, edge_N)
    ratio_N = _ratio(log_ratio_N, lost_N | (advantage_N == 0))
    return -torch.where(lost_N, edge_N, ratio_N) * advantage_N, lost_N


def _cispo(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """sg[clip(r)] A log pi, arXiv 2506.13585 eq. 4-5. Nothing loses its gradient; clip_low >= 1 sets no lower bound."""
    low, high = _edges(row)
    weight_N = log_ratio_N.detach().exp().clamp(max(0.0, 1 - low), 1 + high)
    return -weight_N * inputs.advantage_N * inputs.logprob_N, torch.zeros_like(weight_N, dtype=torch.bool)


def _sapo(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """(4 / tau) sigmoid(tau (r - 1)) A, arXiv 2511.20347 eq. 5-6; lost where the sigmoid is flat to the last bit."""
    assert row.soft_positive is not None
    assert row.soft_negative is not None
    advantage_N = inputs.advantage_N
    tau_N = _by_sign(advantage_N, row.soft_positive[0], row.soft_negative[0])
    gate_N = torch.sigmoid(tau_N * torch.expm1(log_ratio_N.detach()))
    flat_N = gate_N * (1 - gate_N) == 0
    ratio_N = _ratio(log_ratio_N, flat_N)
    gate_N = torch.where(flat_N, gate_N, torch.sigmoid(tau_N * (ratio_N - 1)))
    return -4 / tau_N * gate_N * advantage_N, flat_N


def _gmpo(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """exp(mean of the log ratios, each clipped on the advantage's side) A, arXiv 2507.20673 eq. 4."""
    low, high = _edges(row)
    advantage_N, log_N = inputs.advantage_N, log_ratio_N.detach()
    clipped_N = torch.where(advantage_N > 0, log_N > high, log_N < -low)
    edged_N = torch.where(clipped_N, _by_sign(advantage_N, high, -low), log_ratio_N)
    mean_N = spread(segment_mean(edged_N, inputs.sequence_N, inputs.sequences), inputs.sequence_N)
    return -_ratio(mean_N, advantage_N == 0) * advantage_N, clipped_N


def _minirl(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """M sg[min(pi/rollout, cap)] A log pi, arXiv 2512.01374 eq. 7; M is PPO's mask on the row's own ratio."""
    lost_N = _outside(log_ratio_N, inputs.advantage_N, row)
    weight_N = (inputs.logprob_N.detach() - inputs.rollout_logprob_N).exp().clamp(max=row.weight_cap)
    return -torch.where(lost_N, 0.0, weight_N) * inputs.advantage_N * inputs.logprob_N, lost_N


LOG_PRODUCT_RANGE = (math.log(1e-8), 20.0)
"""Bounds on VESPO's detached log W, past which its weight is 0 in effect (above) or would be in the end (below)."""


def _vespo(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """sg[W^k exp(lambda (1 - W))] A log pi, W the product ratio, arXiv 2602.10693; lost where the weight is 0."""
    assert row.soft_positive is not None
    assert row.soft_negative is not None
    advantage_N = inputs.advantage_N
    log_N = log_ratio_N.detach().clamp(*LOG_PRODUCT_RANGE)
    power_N, decay_N = (_by_sign(advantage_N, p, n) for p, n in zip(row.soft_positive, row.soft_negative, strict=True))
    weight_N = (decay_N + power_N * log_N - decay_N * log_N.exp()).exp()
    return -weight_N * advantage_N * inputs.logprob_N, weight_N == 0


def _dppo(log_ratio_N: Tensor, inputs: PolicyInputs, row: Algorithm) -> tuple[Tensor, Tensor]:
    """r A unless the token's probability has moved too far from the anchor's, arXiv 2602.04879 (total variation).

    With weight_cap both value and gradient are scaled by min(r, cap) / r, so that the cap silences nothing.
    """
    low, high = _edges(row)
    advantage_N, log_N = inputs.advantage_N, log_ratio_N.detach()
    probability_N = inputs.logprob_N.detach().exp()
    moved_N = probability_N - (inputs.logprob_N.detach() - log_N).exp()
    lost_N = ((advantage_N > 0) & (moved_N > high)) | ((advantage_N < 0) & (moved_N < -low))
    cap = math.inf if row.weight_cap is None else math.log(row.weight_cap)
    capped_N = log_ratio_N - (log_N - log_N.clamp(max=cap))
    ratio_N = _ratio(capped_N, lost_N | (advantage_N == 0))
    return -torch.where(lost_N, 0.0, ratio_N) * advantage_N, lost_N


GATES: dict[str, Gate] = {
    "none": _none,
    "clip": _clip,
    "cispo": _cispo,
    "sapo": _sapo,
    "gmpo": _gmpo,
    "minirl": _minirl,
    "vespo": _vespo,
    "dppo": _dppo,
}
