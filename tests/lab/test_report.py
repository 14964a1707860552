"""The pictures and the page: what is drawn is what was measured."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from gspo.lab import claims
from gspo.view.svg import Series, chart, legend


def drawn(text: str, tag: str) -> list[list[tuple[float, float]]]:
    """Points of each polyline or polygon."""
    found = re.findall(rf'<{tag} points="([^"]+)"', text)
    return [[(float(x), float(y)) for x, y in (p.split(",") for p in points.split())] for points in found]


def line(values: list[float | None], name: str = "arm") -> Series:
    return Series(name, list(range(1, len(values) + 1)), values, values, values)


def test_a_chart_is_well_formed_and_higher_values_lie_higher() -> None:
    text = chart("a < b", "step", [line([0.0, 0.5, 1.0])], unit=True)
    ET.fromstring(text)
    (points,) = drawn(text, "polyline")
    (x0, y0), (x1, y1), (x2, y2) = points
    assert x0 < x1 < x2
    assert y0 > y1 > y2
    assert y0 - y1 == pytest.approx(y1 - y2, abs=0.2)
    assert x1 - x0 == pytest.approx(x2 - x1, abs=0.2)


def test_a_logarithmic_axis_spaces_powers_evenly_and_puts_nothing_at_its_foot() -> None:
    text = chart("t", "step", [line([1e-4, 1e-3, 1e-2, 0.0])], log=True)
    (points,) = drawn(text, "polyline")
    ys = [y for _, y in points]
    assert ys[0] - ys[1] == pytest.approx(ys[1] - ys[2], abs=0.2)
    assert ys[3] == max(ys)


def test_a_gap_breaks_the_line() -> None:
    assert [len(p) for p in drawn(chart("t", "step", [line([0.1, 0.2, None, 0.3, 0.4])]), "polyline")] == [2, 2]


def test_a_band_spans_the_seeds_and_one_seed_has_none() -> None:
    banded = Series("arm", [1, 2], [0.5, 0.5], [0.4, 0.4], [0.6, 0.6])
    (points,) = drawn(chart("t", "step", [banded], unit=True), "polygon")
    assert len({y for _, y in points}) == 2
    assert not drawn(chart("t", "step", [line([0.5, 0.5])]), "polygon")


def test_nothing_measured_is_nothing_drawn() -> None:
    assert chart("t", "step", [line([None, None])]) == ""
    assert chart("t", "step", [line([0.0, 0.0])], log=True) == ""


def test_constant_and_negative_numbers_have_an_axis() -> None:
    for values in ([0.3, 0.3], [-2e-3, -1e-3], [0.0, 0.0], [5.0, 5.0]):
        text = chart("t", "step", [line(list(values))])
        ET.fromstring(text)
        assert all(26 <= y <= 234 for _, y in drawn(text, "polyline")[0]), "inside the frame"


@pytest.mark.parametrize("values", [[0.018, 0.013], [1e-4, 0.3], [3e-7, 3e-7], [1.0, 1.0], [9.9e-4, 1e-3]])
def test_a_logarithmic_axis_holds_its_values_and_has_marks(values: list[float]) -> None:
    text = chart("t", "step", [line(list(values))], log=True)
    assert all(26 <= y <= 234 for _, y in drawn(text, "polyline")[0])
    assert text.count('class="grid"') >= 2


def test_the_legend_names_every_arm() -> None:
    names = [f"arm {i} & more" for i in range(9)]
    text = legend(names)
    ET.fromstring(text)
    assert len(set(re.findall(r"<line [^>]*/>", text))) == 9, "no two lines look alike"


KEPT = Path(__file__).parents[2] / "docs" / "lab" / "claims.json"


@pytest.mark.skipif(not KEPT.exists(), reason="no results are kept yet")
def test_the_claims_in_the_docs_are_those_of_the_kept_results() -> None:
    summaries = claims.JSON.validate_json(KEPT.read_bytes())
    assert (KEPT.parents[1] / "claims.md").read_text() == claims.page(summaries)
