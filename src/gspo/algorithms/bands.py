"""How wide a clip band has to be where engine and trainer differ: `clip_low=auto`, `clip_high=auto`.

In: a row, and by how much the log ratio of each answer is off before any update. Out: the row with a band in numbers.
The job calls `sized` once a step.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gspo.presets import Algorithm

PAPER = (3e-4, 4e-4)
"""GSPO's own band, arXiv 2507.18071 section 5.1: what a band sized here is never narrower than."""
QUANTILE, FACTOR = 0.9, 2.0
"""The band is `FACTOR` times what `QUANTILE` of the answers stay within: beyond it, by mismatch alone, are the tails."""


def sized(row: Algorithm, log_ratio_S: Tensor) -> Algorithm:
    """`row` with its band as numbers; unchanged if it has them already, or if there is no answer.

    With w = 2 q, q the 0.9-quantile of |log s| over the step's answers, s the sequence ratio trainer / engine before any
    update (arXiv 2507.18071 eq. 7): low = max(3e-4, w) and high = max(4e-4, 4 w / 3), which keeps the paper's ratio of
    the two. A quantile, for one strange answer not to open the band, and not a higher one, for a step of 16 answers has
    none. The rule is ours; no paper has it. Of stale answers the distance is the lag's, and such a band held nothing (lab,
    `bands`): `config` refuses it with `max_staleness`.

    Args:
        log_ratio_S: mean over each answer's tokens of log-probability trainer minus engine, [S].
    """
    if not row.sizes_band or not len(log_ratio_S):
        return row
    width = FACTOR * float(torch.quantile(log_ratio_S.double().abs(), QUANTILE))
    low, high = PAPER
    return row.model_copy(update={"clip_low": max(low, width), "clip_high": max(high, width * high / low)})
