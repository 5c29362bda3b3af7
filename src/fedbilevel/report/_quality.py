"""The picture of what a true hypergradient buys: the metric against the angle to it, at equal rounds and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from . import canvas
from ._controls import COLOURS
from ._figures import FAINT, INK


class Truthful(NamedTuple):
    """A method in a column: its cosine to the true hypergradient, and the metric at equal rounds and bytes."""

    row: str
    kind: str
    column: str
    cosine: float
    at_rounds: float
    at_bytes: float | None


def draw_quality(points: Sequence[Truthful], columns: Sequence[str], metric: str, share: bool, path: Path) -> None:
    """Draw a panel for each column and each of the two budgets. Numbers beside points name the methods."""
    rows = list(dict.fromkeys(point.row for point in points))
    figure = canvas.figure(3.5 * len(columns) + 0.4, 6.6, w_pad=0.06, h_pad=0.08)
    grid = figure.subplots(2, len(columns), squeeze=False, sharex=True, sharey="col")
    for across, column in enumerate(columns):
        for axes, budget in zip(grid[:, across], ("rounds", "bytes"), strict=True):
            axes.set_title(f"{column}: equal {budget}", loc="left", fontsize=9.5)
            for point in (p for p in points if p.column == column):
                value = point.at_rounds if budget == "rounds" else point.at_bytes
                if value is None:
                    continue
                axes.plot(point.cosine, value, "o", color=COLOURS[point.kind], markersize=6)
                number = str(rows.index(point.row) + 1)
                axes.annotate(
                    number, (point.cosine, value), (5, 4), textcoords="offset points", fontsize=8.5, color=INK
                )
            axes.set_xlim(-0.08, 1.1)
            axes.margins(y=0.15)
            axes.grid(color=FAINT, linewidth=0.4)
            axes.spines[["top", "right"]].set_visible(False)
            axes.tick_params(labelsize=8)
            if share:
                canvas.percent(axes.yaxis)
        grid[1, across].set_xlabel("cosine of the way of x and the true hypergradient", fontsize=8.5)
    grid[0, 0].set_ylabel(metric, fontsize=8.5)
    grid[1, 0].set_ylabel(metric, fontsize=8.5)
    names = "   ".join(f"{number} {row}" for number, row in enumerate(rows, 1))
    figure.suptitle(
        f"What a true hypergradient buys\n{_wrapped(names, 50 * len(columns))}", x=0.01, ha="left", fontsize=9.5
    )
    figure.savefig(path, dpi=130)


def _wrapped(text: str, width: int) -> str:
    lines = [""]
    for word in text.split("   "):
        if lines[-1] and len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += ("   " if lines[-1] else "") + word
    return "\n".join(lines)
