"""Figures of studies: accuracy curves in panels, with mean and band over seeds and the paper's readings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from . import canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROWS = {"test_accuracy": "test", "train_accuracy": "training"}  # the rows on which an accuracy is measured
GREY = "#5a6570"
COLOURS = ("#1f4e79", "#b5482a", "#4c8c4a", "#8a5fa8", "#a08020", GREY)


@dataclass(frozen=True)
class Line:
    """A curve of an accuracy (`metric`): one history for each seed, and the paper's readings as (x, accuracy)."""

    label: str
    panel: int
    histories: list[list[dict[str, Any]]]
    readings: list[tuple[float, float]]
    metric: str = "test_accuracy"


@dataclass(frozen=True)
class Axis:
    """The horizontal axis of a panel: a figure of the history, in a unit."""

    key: str
    label: str
    unit: float = 1.0
    logarithmic: bool = False


AXES = {
    "rounds": Axis("rounds", "communication rounds"),
    "iterations": Axis("iteration", "outer iterations"),
    "minutes": Axis("seconds", "minutes of training (logarithmic)", 60.0, logarithmic=True),  # ours take seconds
}


def draw_panels(lines: Sequence[Line], panels: Mapping[str, str], title: str, paths: Sequence[Path]) -> None:
    """Draw one axes for each panel. `panels` has the name of the horizontal axis for each title of a panel.

    A label has the same colour in all panels. If a panel has both accuracies, that on training rows is dashed.
    """
    count = len(panels)
    columns = min(count, 2 if count != 3 else 3)
    rows = -(-count // columns)
    figure = canvas.figure(5.2 * columns + (1.5 if count == 1 else 0), 3.6 * rows + 0.6)
    labels = list(dict.fromkeys(line.label for line in lines))
    grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
    for number, (axes, (panel, x)) in enumerate(zip(grid.flat, panels.items(), strict=False)):
        axes.set_title(panel, loc="left", fontsize=10.5)
        mine = [line for line in lines if line.panel == number]
        both = len({line.metric for line in mine}) > 1
        for line in mine:
            _draw(axes, line, COLOURS[labels.index(line.label) % len(COLOURS)], AXES[x], both)
        _finish(axes, mine, AXES[x])
    grid.flat[0].set_ylim(_lowest(lines), 1.0)  # the panels share it
    for unused in grid.flat[count:]:
        unused.set_visible(False)
    figure.suptitle(title, fontsize=12)
    for path in paths:
        figure.savefig(path, dpi=130)


def _draw(axes: Axes, line: Line, colour: str, x: Axis, both: bool) -> None:
    places = [np.asarray([r[x.key] / x.unit for r in history]) for history in line.histories]
    values = [np.asarray([r.get(line.metric) for r in history], float) for history in line.histories]
    at = places[0][places[0] > 0] if x.logarithmic else places[0]  # a logarithmic axis has no zero
    stacked = np.stack([np.interp(at, p, v) for p, v in zip(places, values, strict=True)])
    style = "--" if both and line.metric == "train_accuracy" else "-"
    label = line.label if style == "-" else None  # one entry of the legend for both accuracies
    axes.plot(at, stacked.mean(0), color=colour, linewidth=1.1, linestyle=style, label=label)
    if len(stacked) > 1:
        axes.fill_between(at, stacked.min(0), stacked.max(0), color=colour, alpha=0.18, linewidth=0)
    for place, accuracy in line.readings:
        axes.plot(place, accuracy, marker="*", markersize=12, color=colour, markeredgecolor="white", zorder=4)


def _lowest(lines: Sequence[Line]) -> float:
    """Where the vertical axis begins: at a half if all lines end well above it, so that they can be told apart."""
    tails = [np.asarray([r.get(line.metric) for r in h][-50:], float) for line in lines for h in line.histories]
    finals = [tail[~np.isnan(tail)].mean() for tail in tails if not np.isnan(tail).all()]
    return 0.5 if min(finals, default=0) > 0.7 else 0.0


def _finish(axes: Axes, lines: Sequence[Line], x: Axis) -> None:
    axes.set(
        xlabel=x.label,
        ylabel=" and ".join(dict.fromkeys(ROWS[line.metric] for line in lines)) + " accuracy",
    )
    if x.logarithmic:
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.axhline(0.9, color="#c8c8c8", linewidth=0.8, zorder=0)
    canvas.percent(axes.yaxis, decimals=0)
    axes.xaxis.set_major_formatter("{x:g}" if x.logarithmic else "{x:,.0f}")
    axes.yaxis.set_tick_params(labelleft=True)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    if len({line.metric for line in lines}) > 1:
        (dashed,) = axes.plot([], [], "--", color=GREY, linewidth=1.1)
        handles, labels = [*handles, dashed], [*labels, "on training rows"]
    if any(line.readings for line in lines):
        (star,) = axes.plot([], [], "*", color=GREY, markersize=10, linestyle="none")
        handles, labels = [*handles, star], [*labels, "read off the paper"]
    axes.legend(handles, labels, loc="best", fontsize=9, frameon=False)
