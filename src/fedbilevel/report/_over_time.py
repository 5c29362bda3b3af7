"""The picture of how what was found changes over the rounds, a panel for each column of an application."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from . import canvas
from ._figures import FAINT
from ._finding import COLOURS


class Course(NamedTuple):
    """A metric over the rounds in a column, for one seed."""

    column: str
    metric: str
    rounds: Sequence[float]
    values: Sequence[float]


def draw_over_time(courses: Sequence[Course], names: Mapping[str, str], title: str, path: Path) -> None:
    """Draw the metrics of every column over the rounds, a line for each seed. `names` are those of the metrics."""
    columns = list(dict.fromkeys(course.column for course in courses))
    across = min(4, len(columns))
    down = -(-len(columns) // across)
    figure = canvas.figure(3.4 * across + 0.4, 2.4 * down + 0.9, w_pad=0.06, h_pad=0.08)
    grid = figure.subplots(down, across, squeeze=False, sharex=True, sharey=True)
    colours = dict(zip(names, COLOURS, strict=False))
    for place, axes in enumerate(grid.flat):
        if place >= len(columns):
            axes.set_visible(False)
            continue
        for course in (each for each in courses if each.column == columns[place]):
            axes.plot(course.rounds, course.values, color=colours[course.metric], linewidth=1, alpha=0.75)
        axes.set_title(columns[place], loc="left", fontsize=9.5)
        axes.grid(color=FAINT, linewidth=0.4)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
        if place // across == down - 1:
            axes.set_xlabel("rounds", fontsize=8.5)
    marks = [grid.flat[0].plot([], [], color=colours[metric])[0] for metric in names]
    figure.legend(marks, [*names.values()], loc="outside lower left", ncols=4, frameon=False, fontsize=8.5)
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5)
    figure.savefig(path, dpi=130)
