"""Curves as SVG text, so that a report is one file that opens anywhere.

In: series of numbers. Out: an `<svg>` element. The reports of runs and of the lab call it. The few marks that they need are drawn here;
with a plotting library each chart would bring fonts and paths of a hundred kilobytes, and the report a dependency.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

COLOURS = ("#1f6fb4", "#d1495b", "#2a9d5c", "#e09f1f", "#7b52ab", "#5b6770", "#c2568f", "#3aa6a6")
_DASHES = ("", "6 3", "2 2.5", "8 3 2 3", "1 3")
_WIDTH, _HEIGHT = 460, 270
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 10, 26, 36


@dataclass(frozen=True)
class Series:
    """A line with a band around it. A None breaks the line."""

    name: str
    x: Sequence[float]
    middle: Sequence[float | None]
    low: Sequence[float | None]
    high: Sequence[float | None]


@dataclass(frozen=True)
class Axis:
    """From numbers to pixels."""

    lowest: float
    highest: float
    log: bool
    start: float
    end: float

    def at(self, value: float) -> float:
        inside = min(max(value, self.lowest), self.highest)
        a, b, v = (math.log10(n) if self.log else n for n in (self.lowest, self.highest, inside))
        return self.start + (self.end - self.start) * ((v - a) / (b - a) if b > a else 0.5)


def chart(title: str, x_label: str, series: Sequence[Series], *, log: bool = False, unit: bool = False) -> str:
    """A line chart. `log`: logarithmic upwards, a value of 0 lies at its foot. `unit`: from 0 to 1, as rewards are."""
    drawn = [v for s in series for v in (*s.low, *s.middle, *s.high) if v is not None and (v > 0 or not log)]
    if not drawn:
        return ""
    x_axis = Axis(min(min(s.x) for s in series), max(max(s.x) for s in series), False, _LEFT, _WIDTH - _RIGHT)
    bottom, top = (0.0, 1.0) if unit else _rounded(min(drawn), max(drawn), log)
    y_axis = Axis(bottom, top, log, _HEIGHT - _BOTTOM, _TOP)
    lines = [_band(s, i, x_axis, y_axis) for i, s in enumerate(series)]
    lines += [_line(s, i, x_axis, y_axis) for i, s in enumerate(series)]
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        f'<text x="{_LEFT}" y="14" class="title">{escape(title)}</text>'
        f"{_grid(x_axis, y_axis, x_label)}{''.join(lines)}</svg>"
    )


def standalone(drawn: str, names: Sequence[str] = ()) -> str:
    """A chart as a file of its own, with its `names` in the colours of their lines."""
    keys = "".join(
        f'<g transform="translate({_LEFT + 8},{_TOP + 8 + 14 * i})"><line x1="0" x2="22" y1="0" y2="0" {_style(i)}/>'
        f'<text x="28" y="3.5">{escape(name)}</text></g>'
        for i, name in enumerate(names)
    )
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{1.5 * _WIDTH:g}" height="{1.5 * _HEIGHT:g}" '
    style = (
        "<style>text{font:11px system-ui,sans-serif;fill:#445}.title{font-size:12.5px;font-weight:600;fill:#112}"
        ".grid{stroke:#e8ecef}</style>"
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>'
    )
    inside = drawn.removeprefix("<svg ").removesuffix("</svg>")
    frame, _, marks = inside.partition(">")
    return f"{head}{frame}>{style}{marks}{keys}</svg>\n"


def legend(names: Sequence[str]) -> str:
    """The names in the colours and dashes of their lines."""
    items = (
        f'<span><svg class="key" viewBox="0 0 30 8"><line x1="1" x2="29" y1="4" y2="4" {_style(i)}/></svg>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def _style(i: int) -> str:
    dash = _DASHES[i % len(_DASHES)]
    dashed = f' stroke-dasharray="{dash}"' if dash else ""
    return f'stroke="{COLOURS[i % len(COLOURS)]}" stroke-width="1.8" fill="none" stroke-linejoin="round"{dashed}'


def _points(
    x: Sequence[float], y: Sequence[float | None], x_axis: Axis, y_axis: Axis
) -> list[list[tuple[float, float]]]:
    """Pixels of the stretches without a gap."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for a, b in zip(x, y, strict=True):
        if b is None:
            stretches.append([])
        else:
            stretches[-1].append((round(x_axis.at(a), 1), round(y_axis.at(b), 1)))
    return [s for s in stretches if s]


def _line(s: Series, i: int, x_axis: Axis, y_axis: Axis) -> str:
    paths = _points(s.x, s.middle, x_axis, y_axis)
    drawn = "".join(f'<polyline points="{_text(p)}" {_style(i)}/>' for p in paths if len(p) > 1)
    dots = (p[0] for p in paths if len(p) == 1)
    return drawn + "".join(f'<circle cx="{a}" cy="{b}" r="2" fill="{COLOURS[i % len(COLOURS)]}"/>' for a, b in dots)


def _band(s: Series, i: int, x_axis: Axis, y_axis: Axis) -> str:
    if list(s.low) == list(s.high):
        return ""
    low, high = (_points(s.x, side, x_axis, y_axis) for side in (s.low, s.high))
    polygons = (_text([*a, *reversed(b)]) for a, b in zip(low, high, strict=True))
    return "".join(f'<polygon points="{p}" fill="{COLOURS[i % len(COLOURS)]}" opacity=".13"/>' for p in polygons)


def _text(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{a:g},{b:g}" for a, b in points)


def _grid(x_axis: Axis, y_axis: Axis, x_label: str) -> str:
    marks = []
    for value in _ticks(y_axis):
        y = y_axis.at(value)
        marks.append(f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        marks.append(f'<text x="{_LEFT - 6}" y="{y + 3.5:.1f}" text-anchor="end">{_number(value)}</text>')
    for value in _ticks(x_axis):
        x = x_axis.at(value)
        marks.append(f'<text x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 15}" text-anchor="middle">{_number(value)}</text>')
    middle = (_LEFT + _WIDTH - _RIGHT) / 2
    marks.append(f'<text x="{middle}" y="{_HEIGHT - 6}" text-anchor="middle">{escape(x_label)}</text>')
    return "".join(marks)


def _ticks(axis: Axis) -> list[float]:
    if axis.log:
        inside = [v for v in _ladder(axis.lowest, axis.highest) if axis.lowest * 0.999 <= v <= axis.highest * 1.001]
        powers = [v for v in inside if round(math.log10(v), 6).is_integer()]
        return powers if len(powers) >= 3 else inside
    step = _step(axis.highest - axis.lowest)
    first = math.ceil(axis.lowest / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(axis.highest / step + 1e-9) + 1)]


def _ladder(low: float, high: float) -> list[float]:
    """1, 2 and 5 times each power of ten from below `low` to above `high`."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [k * 10.0**p for p in powers for k in (1, 2, 5)]


def _step(width: float, most: int = 6) -> float:
    """The smallest of 1, 2, 5 times a power of ten that cuts `width` into at most `most` parts."""
    power: float = 10.0 ** math.floor(math.log10(width)) / 10 if width > 0 else 1.0
    return next(power * k for k in (1, 2, 5, 10, 20, 50, 100) if width <= most * power * k)


def _rounded(low: float, high: float, log: bool) -> tuple[float, float]:
    """Outwards, to a tick."""
    if log:
        ladder = _ladder(low, high)
        bottom = max(v for v in ladder if v <= low * 1.001)
        return bottom, next(v for v in ladder if v >= high * 0.999 and v > bottom)
    step = _step(high - low if high > low else abs(high) or 1.0)
    bottom = math.floor(low / step) * step
    return bottom, max(math.ceil(high / step) * step, bottom + step)


def _number(value: float) -> str:
    return f"{value:g}" if value == 0 or 1e-3 <= abs(value) < 1e5 else f"{value:.0e}".replace("e-0", "e-")
