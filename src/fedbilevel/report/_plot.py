"""A curve as SVG that takes the width it is given: the line is stretched, and texts keep their size."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from itertools import pairwise

BUCKETS = 300  # of a longer curve, each of these parts shows its first, smallest, largest and last value
LARGEST = 1e30  # values beyond it are gaps, as those that are not finite
SIDE = 1000  # the line is drawn in a square of this side, and stretched
DECADE = 10.0  # values within it are drawn on a linear scale, on which they fill the height
Point = tuple[float, float | None]


def line_plot(
    points: Sequence[Point],
    *,
    label: str,
    height: int,
    percent: bool = False,
    log: bool = False,
    axis: bool = True,
) -> str:
    """Draw values (None is a gap) against places, which are not negative.

    label    says to a reader who cannot see the picture what it shows
    percent  whether values are shares
    log      whether the scale of the values is logarithmic, if all are positive and they span more than a decade
    axis     whether the places have numbers
    """
    shown = [(x, y if y is not None and abs(y) <= LARGEST else None) for x, y in points if 0 <= x <= LARGEST]
    values = [y for _, y in shown if y is not None]
    if not values:
        return '<p class="note">There is no value yet.</p>'
    log = log and min(values) > 0 and max(values) > DECADE * min(values)
    drawn = _thinned([(x, y if y is None or not log else math.log10(y)) for x, y in shown])
    heights = [y for _, y in drawn if y is not None]
    right = max(x for x, _ in drawn) or 1.0
    count = 4 if height > 150 else 2
    make = _decades if log else _ticks
    ticks = make(min(heights), max(heights), count)
    if percent:  # a share is never beyond 0 and 1
        ticks = [tick for tick in ticks if -1e-9 <= tick <= 1 + 1e-9] or ticks
    low, high = min(ticks[0], *heights), max(ticks[-1], *heights)
    high = high if high > low else low + 1.0
    top, foot = 8, height - (22 if axis else 8)

    def place(y: float) -> float:
        return top + (foot - top) * (high - y) / (high - low)

    grid = scale = ""
    for tick in ticks:
        text = _number(10**tick if log else tick, percent)
        grid += f'<line class="grid" x1="0" x2="100%" y1="{place(tick):.1f}" y2="{place(tick):.1f}"/>'
        scale += f'<text x="100%" y="{place(tick) + 4:.1f}" text-anchor="end">{text}</text>'
    if axis:
        for mark in _ticks(0.0, right, 4):
            if mark > right:
                continue
            end = "start" if mark == 0 else "end" if mark > 0.93 * right else "middle"
            text = _number(mark, False)
            grid += f'<text x="{100 * mark / right:.2f}%" y="{height - 5}" text-anchor="{end}">{text}</text>'
    line, last = "", None
    pen = "M"
    for x, y in drawn:
        if y is None:
            pen = "M"
            continue
        last = x, y
        line += f"{pen}{SIDE * x / right:.1f} {SIDE * (high - y) / (high - low):.1f}"
        pen = "L"
    assert last is not None
    dot = f'<circle class="dot" cx="{100 * last[0] / right:.2f}%" cy="{place(last[1]):.1f}" r="3.5"/>'
    inner = (
        f'<svg class="inner" x="0" y="{top}" width="100%" height="{foot - top}" viewBox="0 0 {SIDE} {SIDE}" '
        f'preserveAspectRatio="none"><path class="curve" d="{line}"/></svg>'
    )
    return (
        f'<div class="plot" role="img" aria-label="{html.escape(label)}">'
        f'<svg class="scale" height="{height}">{scale}</svg>'
        f'<svg class="area" height="{height}">{grid}{inner}{dot}</svg></div>'
    )


def _thinned(points: Sequence[Point]) -> Sequence[Point]:
    """Few points that look like many: the first, the smallest, the largest and the last of each part."""
    if len(points) <= 4 * BUCKETS:
        return points
    kept: list[Point] = []
    for start, end in pairwise(len(points) * turn // BUCKETS for turn in range(BUCKETS + 1)):
        there = [(y, at) for at in range(start, end) if (y := points[at][1]) is not None]
        some = {start, end - 1, *([min(there)[1], max(there)[1]] if there else [])}
        kept += [points[at] for at in sorted(some)]
    return kept


def _ticks(low: float, high: float, count: int) -> list[float]:
    """Round numbers from at most `low` to at least `high`."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-30):
        wide = max(abs(high) * 0.1, 1e-6)
        low, high = low - wide, high + wide
    raw = (high - low) / count
    size = 10.0 ** math.floor(math.log10(raw))
    step = next(size * factor for factor in (1, 2, 2.5, 5, 10) if size * factor >= raw * 0.999)
    return [step * turn for turn in range(math.floor(low / step), math.ceil(high / step) + 1)]


def _decades(low: float, high: float, count: int) -> list[float]:
    """Whole powers of ten, about this many."""
    first, last = math.floor(low), math.ceil(high)
    return [float(tick) for tick in range(first, last + 1, max(-(-(last - first) // count), 1))]


def _number(value: float, percent: bool) -> str:
    if percent:
        return f"{100 * value:.4g}%"
    if value and not 1e-3 <= abs(value) < 1e9:
        return f"{value:.1e}".replace(".0e", "e").replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")
    for size, letter in ((1e6, "M"), (1e4, "k")):  # short, as there is little room beside a small curve
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):,.4g}{letter}"
    return f"{value:,.6g}" if abs(value) < 1000 else f"{value:,.0f}"
