"""The picture of an application: methods and controls with their mean and deviation, a panel for each column."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import canvas
from ._figures import FAINT, INK, MARK

COLOURS = {"bilevel": MARK, "control": INK, "oracle": "#7a7a7a"}
MEANING = {
    "bilevel": "bilevel",
    "control": "control",
    "oracle": "oracle, which knows what nobody knows",
}
ACROSS = 4  # panels beside each other


class Scored(NamedTuple):
    """A row in a column: its label, its kind, the column, and the mean and deviation of the metric."""

    row: str
    kind: str
    column: str
    mean: float
    deviation: float


def draw_controls(
    cells: Sequence[Scored], columns: Sequence[str], metric: str, share: bool, title: str, path: Path
) -> None:
    """Draw a panel for each column, with the rows below each other and the number beside each point."""
    rows = list(dict.fromkeys(cell.row for cell in cells))
    across = min(ACROSS, len(columns))
    down = -(-len(columns) // across)
    figure = canvas.figure(2.9 * across + 2.2, (0.29 * len(rows) + 0.75) * down + 0.7, w_pad=0.06, h_pad=0.06)
    grid = figure.subplots(down, across, squeeze=False, sharey=True)
    for place, axes in enumerate(grid.flat):
        if place >= len(columns):
            axes.set_visible(False)
            continue
        own = [cell for cell in cells if cell.column == columns[place]]
        width = max((c.mean for c in own), default=1.0) - min((c.mean for c in own), default=0.0) or 1.0
        for cell in own:
            at, colour = rows.index(cell.row), COLOURS[cell.kind]
            axes.plot(
                [cell.mean - cell.deviation, cell.mean + cell.deviation], [at, at], color=colour, linewidth=1.4
            )
            axes.plot(cell.mean, at, "o", color=colour, markersize=5)
            text = f"{100 * cell.mean:.1f}" if share else f"{cell.mean:.3g}"
            right = cell.mean + cell.deviation + 0.04 * width
            axes.text(right, at, text, va="center", fontsize=7.5, color=colour)
        axes.set_title(columns[place], loc="left", fontsize=9.5)
        axes.margins(x=0.16)
        axes.set_yticks(range(len(rows)), rows, fontsize=8.5)
        axes.set_ylim(len(rows) - 0.4, -0.6)
        axes.tick_params(axis="x", labelsize=8)
        if share:
            canvas.percent(axes.xaxis)
        axes.xaxis.set_major_locator(canvas.few_ticks())
        axes.grid(axis="y", color=FAINT, linewidth=0.4)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.tick_params(axis="y", length=0)
    kinds = [kind for kind in MEANING if any(cell.kind == kind for cell in cells)]
    caption = f"{title}\n{metric}; a line is one deviation of the seeds"
    figure.suptitle(caption, x=0.01, ha="left", fontsize=10.5)
    marks = [grid.flat[0].plot([], [], "o", color=COLOURS[kind])[0] for kind in kinds]
    figure.legend(
        marks, [MEANING[k] for k in kinds], loc="outside lower left", ncols=3, frameon=False, fontsize=8.5
    )
    figure.savefig(path, dpi=130)
