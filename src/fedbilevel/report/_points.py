"""Figures of studies that compare final accuracies: accuracy against a setting, with a line for each label."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

from . import canvas
from ._panels import COLOURS

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKERS = "osD^vP"


@dataclass(frozen=True)
class Points:
    """A line: its places on the axis, each with the accuracy reached. A run without a place is a level line.

    Places are numbers or names. Names stand in their order, and no line joins them.
    """

    label: str
    panel: int
    places: list[tuple[float | str | None, float]]


def draw_points(lines: Sequence[Points], panels: Sequence[str], title: str, x: str, paths: Sequence[Path]) -> None:
    """Draw one axes for each panel. A label has the same colour and marker in all panels, and there is one legend.

    The points of all labels at one place stand side by side, so that equal values do not hide each other.
    """
    labels = list(dict.fromkeys(line.label for line in lines))
    ticks = _ticks(at for line in lines for at, _ in line.places if at is not None)
    figure = canvas.figure(5.0 * len(panels) + 1.7, 4.3)
    grid = figure.subplots(1, len(panels), squeeze=False, sharey=True)[0]
    for panel, (name, axes) in enumerate(zip(panels, grid, strict=True)):
        axes.set_title(name, loc="left", fontsize=10.5)
        for line in (one for one in lines if one.panel == panel):
            _draw(axes, line, labels.index(line.label), len(labels), ticks, x)
        _finish(axes, ticks, x)
    known = {name: handle for axes in grid for handle, name in zip(*axes.get_legend_handles_labels(), strict=True)}
    figure.legend([known[name] for name in labels], labels, loc="outside right center", frameon=False, fontsize=9)
    figure.suptitle(title, fontsize=12)
    for path in paths:
        figure.savefig(path, dpi=130)


def _ticks(places: Iterable[float | str]) -> dict[float | str, float]:
    """The position of each place on the axis: its value for a number, its index for a name."""
    return {at: float(turn if isinstance(at, str) else at) for turn, at in enumerate(dict.fromkeys(places))}


def _draw(axes: Axes, line: Points, place: int, count: int, ticks: dict[float | str, float], x: str) -> None:
    colour = COLOURS[place % len(COLOURS)]
    for _, level in (p for p in line.places if p[0] is None):
        axes.axhline(level, color=colour, linewidth=1.0, linestyle="--", label=line.label)
        return
    places, values = zip(*sorted((ticks[at], value) for at, value in line.places if at is not None), strict=True)
    named = _are_named(ticks)
    apart = 0.0 if _is_measured(x) else min((b - a for a, b in pairwise(places)), default=0.0)
    width = (0.6 if named else 0.25) * apart
    shift = width * ((place + 0.5) / count - 0.5)
    axes.plot(
        [p + shift for p in places],
        values,
        label=line.label,
        color=colour,
        linewidth=0 if named else 1.2,
        marker=MARKERS[place % len(MARKERS)],
        markersize=5.5,
        markeredgecolor="white",
    )


def _finish(axes: Axes, ticks: dict[float | str, float], x: str) -> None:
    axes.set(xlabel=x, ylabel="test accuracy at the end", ylim=(0, 1.0))
    if _is_measured(x):
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,g}")
    elif _are_named(ticks):
        axes.set_xticks(list(ticks.values()), [str(name) for name in ticks])
    else:
        axes.set_xticks(sorted(ticks.values()))
        canvas.percent(axes.xaxis, decimals=0)
    canvas.percent(axes.yaxis, decimals=0)
    axes.yaxis.set_tick_params(labelleft=True)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)


def _are_named(ticks: dict[float | str, float]) -> bool:
    return any(isinstance(at, str) for at in ticks)


def _is_measured(x: str) -> bool:
    """Whether the places on the axis are measured, like epsilon, and not settings, like shares."""
    return x.startswith("epsilon")
