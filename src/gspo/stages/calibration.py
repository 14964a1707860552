"""How far a reward model's certainty can be believed: pairs by the probability that it gave, and how often it was right.

In: scores of held-out pairs. Out: accuracy with its interval, a reliability table, `calibration.csv` and
`calibration.svg`. The stage `reward_model` calls it.

Letters: P pairs.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path

import numpy as np

from gspo.evaluate import Interval, normal_interval, wilson_interval
from gspo.view.svg import Series, chart, standalone

BINS = 10
"""Equal parts of the certainties from 1/2 to 1."""


@dataclass(frozen=True)
class Bin:
    """Pairs about whose better answer the model was about equally certain."""

    certainty_from: float
    certainty_to: float
    pairs: int
    certainty: float
    """Mean probability of the answer that the model takes for the better one."""
    right: float
    """Share of the pairs in which that was the chosen one."""
    right_low: float
    right_high: float
    """95 % interval of the share."""


@dataclass(frozen=True)
class Reliability:
    """What the scores of pairs come to."""

    accuracy: Interval
    """Share of the pairs whose chosen answer has the higher score; equal scores count one half."""
    error: float
    """Expected calibration error: mean over pairs of |certainty - share that is right| of their bins."""
    bins: tuple[Bin, ...]
    """Those with pairs in them."""


def reliability(chosen_P: np.ndarray, rejected_P: np.ndarray) -> Reliability:
    """The table of Guo et al. (arXiv 1706.04599), on the answer that the model prefers."""
    gap_P = np.asarray(chosen_P, dtype=np.float64) - np.asarray(rejected_P, dtype=np.float64)
    right_P = np.where(gap_P > 0, 1.0, np.where(gap_P < 0, 0.0, 0.5))
    certainty_P = 1 / (1 + np.exp(-np.abs(gap_P)))
    place_P = np.minimum((2 * BINS * (certainty_P - 0.5)).astype(int), BINS - 1)
    bins = []
    for k in sorted(set(place_P.tolist())):
        inside = place_P == k
        share = _interval(right_P[inside])
        bins.append(
            Bin(
                certainty_from=0.5 + k / (2 * BINS),
                certainty_to=0.5 + (k + 1) / (2 * BINS),
                pairs=int(inside.sum()),
                certainty=float(certainty_P[inside].mean()),
                right=share.value,
                right_low=share.low,
                right_high=share.high,
            )
        )
    error = sum(b.pairs * abs(b.certainty - b.right) for b in bins) / len(gap_P)
    return Reliability(_interval(right_P), float(error), tuple(bins))


def _interval(right_P: np.ndarray) -> Interval:
    if np.isin(right_P, (0.0, 1.0)).all():
        return wilson_interval(int(right_P.sum()), len(right_P))
    found = normal_interval(right_P)
    low, high = (0.0, 1.0) if math.isnan(found.low) else (max(0.0, found.low), min(1.0, found.high))
    return Interval(found.value, low, high)


def write_calibration(folder: Path, found: Reliability) -> None:
    """`calibration.csv`, a row a bin, and `calibration.svg`, the same as a curve beside the diagonal."""
    with (folder / "calibration.csv").open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([field.name for field in fields(Bin)])
        rows.writerows(astuple(each) for each in found.bins)
    pairs = sum(each.pairs for each in found.bins)
    title = f"right among {pairs} held-out pairs, by certainty (error {found.error:.3f})"
    lines = [_curve(found.bins), Series("as often right as certain", *([[0.5, 1.0]] * 4))]
    drawn = chart(title, "certainty", lines, unit=True)
    (folder / "calibration.svg").write_text(standalone(drawn, [line.name for line in lines]))


def _curve(bins: Sequence[Bin]) -> Series:
    return Series(
        "this model",
        [b.certainty for b in bins],
        [b.right for b in bins],
        [b.right_low for b in bins],
        [b.right_high for b in bins],
    )
