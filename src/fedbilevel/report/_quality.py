"""The picture of what a true hypergradient buys: the metric against the angle to it, at equal rounds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from . import canvas
from ._controls import COLOURS
from ._figures import FAINT

TALL = 4.6  # inches
BESIDE = 1.1  # the cosine at which names begin, to the right of all points
WIDE = 2.35  # where a panel ends; beyond a cosine of one it has names only
APART = 0.062  # the least distance of two names, as a share of the height of a panel


class Truthful(NamedTuple):
    """A method in a column: its cosine to the true hypergradient, and the metric at equal rounds and bytes."""

    row: str
    kind: str
    column: str
    cosine: float
    at_rounds: float
    at_bytes: float | None


def draw_quality(points: Sequence[Truthful], columns: Sequence[str], metric: str, share: bool, path: Path) -> None:
    """Draw a panel for each column with points. A full mark is at equal rounds, a hollow one at equal bytes."""
    shown = [column for column in columns if any(point.column == column for point in points)]
    figure = canvas.figure(4.5 * len(shown) + 0.3, TALL, w_pad=0.08, h_pad=0.08)
    for axes, column in zip(figure.subplots(1, len(shown), squeeze=False)[0], shown, strict=True):
        _panel(axes, [point for point in points if point.column == column])
        axes.set_title(column, loc="left", fontsize=11)
        axes.set_xlabel("cosine of the way of x and the true hypergradient", fontsize=8.5, loc="left")
        if share:
            canvas.percent(axes.yaxis)
        axes.yaxis.set_major_locator(canvas.few_ticks())
    figure.axes[0].set_ylabel(metric, fontsize=8.5)
    figure.suptitle("What a true hypergradient buys", x=0.01, ha="left", fontsize=12.5)
    kinds = [kind for kind in COLOURS if any(point.kind == kind for point in points)]
    first: Any = figure.axes[0]
    marks = [first.plot([], [], "o", color=COLOURS[kind])[0] for kind in kinds]
    marks += [first.plot([], [], "o", color="#555555", markerfacecolor="white")[0]]
    texts = [f"{kind}, at equal rounds" for kind in kinds] + ["the same at equal bytes: those of the cheapest"]
    figure.legend(marks, texts, loc="outside lower left", ncols=3, frameon=False, fontsize=8.5)
    figure.savefig(path, dpi=130)


def _panel(axes: Any, points: Sequence[Truthful]) -> None:
    """The marks of a column, and the name of each method to the right of them at about its height."""
    values = [v for p in points for v in (p.at_rounds, p.at_bytes) if v is not None]
    low, high = min(values), max(values)
    room = 0.1 * (high - low) or 0.05
    axes.set_ylim(low - room, high + room)
    axes.set_xlim(min(-0.08, min(point.cosine for point in points) - 0.08), WIDE)
    span = high - low + 2 * room
    heights = spread([p.at_rounds for p in points], APART * span, low - 0.6 * room, high + 0.6 * room)
    for point, height in zip(points, heights, strict=True):
        colour = COLOURS[point.kind]
        if point.at_bytes is not None:
            axes.plot([point.cosine] * 2, [point.at_rounds, point.at_bytes], color=colour, linewidth=0.8)
            axes.plot(
                point.cosine, point.at_bytes, "o", color=colour, markerfacecolor="white", markersize=5.5, zorder=3
            )
        axes.plot(point.cosine, point.at_rounds, "o", color=colour, markersize=6.5, zorder=4)
        axes.plot([point.cosine, BESIDE - 0.02], [point.at_rounds, height], color=FAINT, linewidth=0.6, zorder=1)
        axes.text(BESIDE, height, point.row, va="center", fontsize=8, color=colour)
    axes.set_xticks([0.0, 0.25, 0.5, 0.75, 1.0], ["0", "0.25", "0.5", "0.75", "1"])
    axes.tick_params(labelsize=8)
    axes.grid(color=FAINT, linewidth=0.3, alpha=0.6)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines["bottom"].set_bounds(axes.get_xlim()[0], 1.0)


def spread(values: Sequence[float], least: float, low: float, high: float) -> list[float]:
    """Heights near the values, in the same order, with at least this distance between any two if they fit."""
    order = sorted(range(len(values)), key=lambda place: values[place])
    made = [values[place] for place in order]
    for place in range(1, len(made)):
        made[place] = max(made[place], made[place - 1] + least)
    above = max(0.0, made[-1] - high) if made else 0.0
    made = [each - above for each in made]
    for place in reversed(range(len(made) - 1)):  # those that were pushed down give way again from the top
        made[place] = min(made[place], made[place + 1] - least)
        made[place] = max(made[place], min(values[order[place]], made[place + 1] - least), low)
    heights = dict(zip(order, made, strict=True))
    return [heights[place] for place in range(len(values))]
