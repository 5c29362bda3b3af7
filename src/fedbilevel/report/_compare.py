"""Several runs side by side: one self-contained page with a curve for each axis and a table, and a picture."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..record import direction
from . import canvas
from ._board import Board, BoardEntry, BoardTable, write_board
from ._measure import ACCURACY, LABELS, points, shared_measure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

STYLES = ("-", "--", "-.", ":")  # beside the colours, for those who cannot tell them apart
POINTS = 300  # of a curve on the page


@dataclass(frozen=True)
class Compared:
    """A run in a comparison: its label, a few words about it, how it stands, its history, summary and spec."""

    label: str
    about: str
    status: str
    history: list[dict[str, Any]]
    summary: Mapping[str, Any]
    spec: str = ""


@dataclass(frozen=True)
class _Axis:
    """What a curve is drawn against: its label, and the fields of a record whose sum it is, with their unit."""

    key: str
    label: str
    fields: tuple[str, ...]
    unit: float = 1.0

    def of(self, record: Mapping[str, Any]) -> float:
        return sum(float(record[field]) for field in self.fields) / self.unit


@dataclass(frozen=True)
class _Theme:
    ink: str
    paper: str
    grid: str
    colours: tuple[str, ...]


AXES = (
    _Axis("rounds", "communication rounds", ("rounds",)),
    _Axis("megabytes", "megabytes, up and down", ("bytes_up", "bytes_down"), 1e6),
    _Axis("seconds", "seconds of training", ("seconds",)),
    _Axis("iterations", "outer iterations", ("iteration",)),
)
THEME = _Theme("#1b1f24", "#ffffff", "#e6e9ed", ("#1f4e79", "#b5482a", "#4c8c4a", "#8a5fa8", "#a08020", "#5a6570"))


def write_comparison(folder: Path, runs: Sequence[Compared], measure: str | None = None) -> list[dict[str, Any]]:
    """Write compare.html and compare.png into a folder that is there; return the rows of the table."""
    chosen = shared_measure([run.history for run in runs], measure)
    rows = [_row(run, chosen) for run in runs]
    (folder / "compare.png").write_bytes(_draw(runs, chosen, AXES, THEME))
    write_board(folder / "compare.html", _board(runs, chosen, rows))
    return rows


def _row(run: Compared, measure: str) -> dict[str, Any]:
    values = [value for _, value in points(run.history, measure)]
    row: dict[str, Any] = {"run": run.label, "about": run.about, "status": run.status}
    if measure == ACCURACY:
        row |= {"final": values[-1], "best": max(values), "rounds_to_90": run.summary["rounds_to"].get("0.90")}
    else:
        row |= {f"{measure} at the end": f"{values[-1]:.5g}", "lowest": f"{min(values):.5g}"}
    last = run.history[-1]
    counts = {"iterations": last["iteration"], "rounds": last["rounds"]}
    return (
        row
        | counts
        | {"MB up": last["bytes_up"] / 1e6, "MB down": last["bytes_down"] / 1e6}
        | {"seconds": last["seconds"]}
    )


def _board(runs: Sequence[Compared], measure: str, rows: Sequence[dict[str, Any]]) -> Board:
    """The runs as a page of one table: a line and a curve for each of them."""
    label = LABELS.get(measure, measure)
    unfinished = [f"{run.label} ({run.status})" for run in runs if run.status != "finished"]
    log = direction(measure) == "min" and all(
        value > 0 for run in runs for _, value in points(run.history, measure)
    )
    table = BoardTable(
        name="runs",
        title=f"{len(runs)} runs",
        metric=label,
        mode=direction(measure),
        log=log,
        targets=(),
        entries=[_entry(run, measure, row) for run, row in zip(runs, rows, strict=True)],
    )
    remark = f"Not finished: {', '.join(unfinished)}." if unfinished else ""
    return Board(f"{len(runs)} runs, by {label}", remark, AXES, [table])


def _entry(run: Compared, measure: str, row: Mapping[str, Any]) -> BoardEntry:
    shown = points(run.history, measure)
    step = max(1, len(shown) // POINTS)
    chosen = [*shown[:-1][::step], shown[-1]]
    values = [value for _, value in chosen]
    places = {axis.key: [axis.of(record) for record, _ in chosen] for axis in AXES}
    return BoardEntry(
        label=run.label,
        spec=run.spec,
        facts={name: value for name, value in row.items() if name != "run"},
        curve={"x": places, "low": values, "mid": values, "high": values},
    )


def _draw(runs: Sequence[Compared], measure: str, axes: Sequence[_Axis], theme: _Theme) -> bytes:
    """The curves of all runs against one axis, or against several in two columns, as a PNG."""
    columns = min(len(axes), 2)
    lines = -(-len(axes) // columns)
    figure = canvas.figure(5.0 * columns, 3.5 * lines + 0.22 * len(runs))
    figure.set_facecolor(theme.paper)
    for axis, place in zip(axes, figure.subplots(lines, columns, squeeze=False).flat, strict=True):
        _curves(place, runs, measure, axis, theme)
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower left", frameon=False, fontsize=11, labelcolor=theme.ink, ncols=1
    )
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=130, facecolor=theme.paper)
    return stream.getvalue()


def _curves(axes: Axes, runs: Sequence[Compared], measure: str, axis: _Axis, theme: _Theme) -> None:
    values: list[float] = []
    for turn, run in enumerate(runs):
        places, heights = zip(*((axis.of(r), v) for r, v in points(run.history, measure)), strict=True)
        values += heights
        axes.plot(
            places,
            heights,
            label=run.label,
            color=theme.colours[turn % len(theme.colours)],
            linestyle=STYLES[turn // len(theme.colours) % len(STYLES)],
            linewidth=1.6,
            marker="o" if len(places) == 1 else None,
        )
    axes.set_xlabel(axis.label, color=theme.ink, fontsize=11)
    axes.set_ylabel(LABELS.get(measure, measure), color=theme.ink, fontsize=11)
    axes.set_xlim(left=0)
    if measure == ACCURACY:
        axes.set_ylim(0, 1)
        canvas.percent(axes.yaxis, decimals=0)
    elif measure == "hypergradient_norm" and min(values) > 0:
        axes.set_yscale("log")
    axes.xaxis.set_major_locator(canvas.few_ticks())
    axes.xaxis.set_major_formatter("{x:,g}")
    axes.tick_params(colors=theme.ink, labelsize=10, which="both")
    axes.set_facecolor(theme.paper)
    axes.grid(axis="y", color=theme.grid)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["bottom", "left"]].set_color(theme.ink)
