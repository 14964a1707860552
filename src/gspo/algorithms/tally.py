"""What a loss did to the answers, in plain numbers that add up over micro-batches and ranks.

In: the inputs of a loss, its token log ratios and the tokens that its gate took the gradient from. Out: a Tally.
`losses.policy_loss` makes it; the learner adds it up and journals its properties.

Suffixes: _N trained tokens (packed), _S sequences of the micro-batch.
"""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from gspo.algorithms.gates import PolicyInputs
from gspo.algorithms.segments import segment_mean, segment_sum


@dataclass(frozen=True)
class Tally:
    """Counts and sums over tokens and rows; `Tally()` is zero, and `+` adds.

    "Lost": the gate took the whole gradient of a token with a non-zero advantage. A row is lost when all of those tokens
    are. Upper and lower is the side of the ratio, then the sign of the advantage. The correction and the KL term are
    not the gate: a lost token may still have the gradient of the KL. A token of weight 0 is not in the loss and counts
    as one without advantage.
    """

    rows: int = 0
    """Rows with a non-zero advantage: the denominator of `clip_rows`."""
    rows_upper_positive: int = 0
    rows_lower_negative: int = 0
    rows_upper_negative: int = 0
    """Only a dual clip, or a soft gate that has gone flat, takes these."""
    tokens: int = 0
    """Tokens with a non-zero advantage: the denominator of `clip_tokens`."""
    tokens_upper_positive: int = 0
    tokens_lower_negative: int = 0
    tokens_upper_negative: int = 0
    tokens_dropped: int = 0
    """Of `tokens`, those that the mismatch correction gave the weight 0."""
    all_rows: int = 0
    """Rows with a token, whatever their advantage: the denominator of the log ratios' sums."""
    all_tokens: int = 0
    kl_tokens: int = 0
    """Tokens with a reference: the denominator of `kl_sum`."""
    log_ratio_rows_sum: float = 0.0
    """Over rows, of the mean over the row of log(pi / anchor): the log of GSPO's ratio."""
    log_ratio_rows_square: float = 0.0
    log_ratio_tokens_sum: float = 0.0
    """Over tokens, of log(pi / anchor)."""
    log_ratio_tokens_square: float = 0.0
    kl_sum: float = 0.0
    """Of k3 against the reference at each token, whatever estimator the loss uses, so that runs compare."""
    values: int = 0
    """Tokens whose value a critic was trained on: the denominator of `clip_values`."""
    values_clipped: int = 0
    """Of `values`, those whose gradient the clip of the value loss took."""
    value_loss: float = 0.0
    """Of the update, without a coefficient."""
    lost_S: tuple[float | None, ...] = ()
    """Of each row, the share of its tokens with a non-zero advantage that were lost; None if it has none. `+` puts the
    rows of one behind those of the other."""

    def __add__(self, other: Tally) -> Tally:
        return Tally(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    @property
    def rows_lost(self) -> int:
        return self.rows_upper_positive + self.rows_lower_negative + self.rows_upper_negative

    @property
    def tokens_lost(self) -> int:
        return self.tokens_upper_positive + self.tokens_lower_negative + self.tokens_upper_negative

    @property
    def clip_rows(self) -> float:
        """Share of the rows with a non-zero advantage that lost their gradient; 0 if there is none."""
        return self.rows_lost / self.rows if self.rows else 0.0

    @property
    def clip_tokens(self) -> float:
        """Share of the tokens with a non-zero advantage that lost their gradient; 0 if there is none."""
        return self.tokens_lost / self.tokens if self.tokens else 0.0

    @property
    def clip_values(self) -> float | None:
        """Share of the values that lost their gradient to the clip of the value loss; None without a critic."""
        return self.values_clipped / self.values if self.values else None

    @property
    def std_log_ratio_rows(self) -> float:
        """Standard deviation of log s over rows: to be read beside GSPO's clip band."""
        return _deviation(self.log_ratio_rows_sum, self.log_ratio_rows_square, self.all_rows)

    @property
    def std_log_ratio_tokens(self) -> float:
        """Standard deviation of the token log ratio."""
        return _deviation(self.log_ratio_tokens_sum, self.log_ratio_tokens_square, self.all_tokens)

    @property
    def kl(self) -> float:
        """Mean over tokens of k3 against the reference; 0 without one."""
        return self.kl_sum / self.kl_tokens if self.kl_tokens else 0.0


def _deviation(total: float, square: float, count: int) -> float:
    if not count:
        return 0.0
    variance = square / count - (total / count) ** 2
    return math.sqrt(variance) if variance > 0 or math.isnan(variance) else 0.0  # rounding may leave -1e-20


@torch.no_grad()
def tally(inputs: PolicyInputs, *, token_log_ratio_N: Tensor, lost_N: Tensor, dropped_N: Tensor) -> Tally:
    """The Tally of one micro-batch. Three copies to the host, so three waits for a GPU."""

    def rows(x_N: Tensor) -> Tensor:
        return segment_sum(x_N.double(), inputs.sequence_N, inputs.sequences)

    log_N = token_log_ratio_N.double()
    log_S = segment_mean(log_N, inputs.sequence_N, inputs.sequences)
    active_N = (inputs.advantage_N != 0) & (inputs.weight_N != 0)
    active_S, lost_S = rows(active_N), rows(lost_N & active_N)
    counts = {
        "rows": active_S > 0,
        **_sides("rows", (active_S > 0) & (active_S == lost_S), rows(inputs.advantage_N), log_S),
        "tokens": active_N,
        **_sides("tokens", lost_N & active_N, inputs.advantage_N, log_N),
        "tokens_dropped": dropped_N & active_N,
        "all_rows": rows(torch.ones_like(log_N)) > 0,
    }
    kl_N = _kl(inputs)
    sums = {
        "log_ratio_rows_sum": log_S,
        "log_ratio_rows_square": log_S.square(),
        "log_ratio_tokens_sum": log_N,
        "log_ratio_tokens_square": log_N.square(),
        "kl_sum": kl_N,
    }
    shares = (lost_S / active_S).tolist()  # 0/0, and so not a number, where nothing was active
    return Tally(
        all_tokens=len(log_N),
        kl_tokens=len(kl_N),
        lost_S=tuple(None if math.isnan(share) else share for share in shares),
        **_totals(counts),
        **_totals(sums),
    )


def _sides(of: str, lost: Tensor, advantage: Tensor, log_ratio: Tensor) -> dict[str, Tensor]:
    """A partition of `lost` by side and sign. For a row with advantages of both signs, its mean decides."""
    positive, above = advantage > 0, log_ratio > 0
    return {
        f"{of}_upper_positive": lost & positive,
        f"{of}_lower_negative": lost & ~positive & ~above,
        f"{of}_upper_negative": lost & ~positive & above,
    }


def _totals(named: dict[str, Tensor]) -> dict[str, Any]:
    """The sum of each, brought to the host together."""
    return dict(zip(named, torch.stack([x.sum() for x in named.values()]).tolist(), strict=True))


def _kl(inputs: PolicyInputs) -> Tensor:
    if inputs.reference_logprob_N is None:
        return inputs.logprob_N.new_zeros(0, dtype=torch.float64)
    d_N = inputs.logprob_N.double() - inputs.reference_logprob_N.double()
    return torch.expm1(-d_N) + d_N
