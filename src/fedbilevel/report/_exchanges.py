"""Diagrams of outer iterations: who sends what to whom, round by round, with time running downwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from . import canvas
from ._figures import INK, MARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERVER, CLIENTS, EDGE = 0.19, 0.575, 1.0  # the lifelines, and the right edge of what the clients do
TINTS = ("#e8eff7", "#fbeee4", "#eaf3ea")
ROW = 0.66  # inches for one round
HEAD = 1.05  # rows above the first round
LINE = 0.37  # rows for a line of the key


@dataclass(frozen=True)
class Exchange:
    """One round. Vectors and formulas are in Matplotlib's mathematical notation.

    down     the vectors that the server sends
    up       the vectors that every client sends back
    work     what a client does, in words
    formula  the same as a formula
    strong   whether the diagram emphasises the round
    """

    down: str
    up: str
    work: str
    formula: str
    strong: bool = False


@dataclass(frozen=True)
class Iteration:
    """One outer iteration of a method: its rounds, and its loops as pairs of the first round and the one after."""

    title: str
    subtitle: str
    exchanges: Sequence[Exchange]
    loops: Sequence[tuple[int, int]]


def draw_iterations(
    iterations: Sequence[Iteration], key: Sequence[str], title: str, paths: Sequence[Path]
) -> None:
    """Draw outer iterations side by side, on one scale, so that a shorter one is seen to be shorter.

    The lines of the key, which explains the symbols, are below the shortest.
    """
    lengths = [len(each.exchanges) for each in iterations]
    shortest = lengths.index(min(lengths))
    longest = max(*lengths, lengths[shortest] + 0.6 + LINE * len(key))
    figure = canvas.figure(5.4 * len(iterations), ROW * (longest + HEAD) + 0.9, w_pad=0.04, h_pad=0.04)
    grid = figure.subplots(1, len(iterations), squeeze=False)[0]
    for axes, each in zip(grid, iterations, strict=True):
        _draw(axes, each, longest)
    for place, line in enumerate(reversed(key)):
        grid[shortest].text(0.0, longest - LINE * place, line, fontsize=10, color="#444a52")
    figure.suptitle(title, fontsize=13, x=0.005, ha="left")
    for path in paths:
        figure.savefig(path, dpi=130)


def _draw(axes: Axes, iteration: Iteration, longest: float) -> None:
    count = len(iteration.exchanges)
    axes.set(xlim=(0, EDGE), ylim=(longest + 0.1, -HEAD))
    axes.axis("off")
    axes.set_title(f"{iteration.title}\n", loc="left", fontsize=12, fontweight="bold", color="#1b1f24")
    axes.text(0, 1.005, iteration.subtitle, transform=axes.transAxes, fontsize=10, va="bottom", color="#444a52")
    for place, (start, end) in enumerate(iteration.loops):
        _shade(axes, start, end, TINTS[place % len(TINTS)])
        text = (
            f"loop {place + 1}: {end - start} rounds"
            if len(iteration.loops) > 1
            else f"loop: {end - start} rounds"
        )
        axes.text(
            0.028, (start + end) / 2, text, rotation=90, ha="center", va="center", fontsize=10, color="#444a52"
        )
    for at, name in ((SERVER, "server"), (CLIENTS, "every client")):
        axes.plot([at, at], [-0.25, count], color="#8a9099", linewidth=1.4, zorder=1)
        box = dict(boxstyle="round,pad=0.35", facecolor="#1b1f24", edgecolor="none")
        axes.text(at, -0.5, name, ha="center", va="center", fontsize=10.5, color="white", bbox=box)
    axes.text(0.085, -0.5, "round", ha="center", va="center", fontsize=9, color="#444a52")
    for place, exchange in enumerate(iteration.exchanges):
        _exchange(axes, place, exchange)


def _shade(axes: Axes, start: int, end: int, colour: str) -> None:
    from matplotlib.patches import FancyBboxPatch

    shape = "round,pad=0,rounding_size=0.02"
    size = (0.0, start + 0.03), EDGE, end - start - 0.06
    axes.add_patch(FancyBboxPatch(*size, boxstyle=shape, facecolor=colour, edgecolor="none", zorder=0))


def _exchange(axes: Axes, place: int, exchange: Exchange) -> None:
    axes.text(0.085, place + 0.5, f"{place + 1}", ha="center", va="center", fontsize=10, color="#444a52")
    middle = (SERVER + CLIENTS) / 2
    for height, colour, ends, text in (
        (place + 0.42, INK, (SERVER + 0.01, CLIENTS - 0.01), exchange.down),
        (place + 0.86, MARK, (CLIENTS - 0.01, SERVER + 0.01), exchange.up),
    ):
        axes.annotate(
            "",
            xy=(ends[1], height),
            xytext=(ends[0], height),
            arrowprops=dict(
                arrowstyle="-|>", color=colour, linewidth=1.5, shrinkA=0, shrinkB=0, mutation_scale=13
            ),
        )
        axes.text(middle, height - 0.04, text, ha="center", va="bottom", fontsize=11.5, color=colour)
    weight = "bold" if exchange.strong else "normal"
    axes.text(
        CLIENTS + 0.02, place + 0.42, exchange.work, va="center", fontsize=9.5, color="#1b1f24", fontweight=weight
    )
    axes.text(CLIENTS + 0.02, place + 0.76, exchange.formula, va="center", fontsize=10, color="#444a52")
