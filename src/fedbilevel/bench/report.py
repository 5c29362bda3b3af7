"""The measurements as tables, as bench.json and as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

CONTESTANTS = {
    "floor_s": ("the floor: bare matrix products", "#9aa0a6"),
    "ours_s": ("fedbilevel", "#1a6fb5"),
    "torch_func_s": ("torch.func with vmap", "#d98c2b"),
    "torch_loop_s": ("PyTorch, client by client", "#b5482a"),
}


def ratio_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table with one line for each case: the seconds of our iteration, and ratios within the same run."""
    table = Table(title="One outer iteration", title_justify="left")
    for column in ("case", "ours, s", "ours/floor", "quartiles", "torch loop/ours", "torch.func/ours", "MB"):
        table.add_column(column, justify="left" if column == "case" else "right")
    for row in rows:
        low, high = row["quartiles"]
        table.add_row(
            row["case"],
            f"{row['ours_s']:.3f}",
            f"{row['ours_over_floor']:.2f}",
            f"{low:.2f} to {high:.2f}",
            _times(row["torch_loop_over_ours"]),
            _times(row["torch_func_over_ours"]),
            f"{row['peak_memory_mb']:,}",
        )
    return table


def profile_table(row: dict[str, Any]) -> Table:
    """Return a table of the parts of our iteration and their times."""
    table = Table(title=f"{row['case']}: where the time goes", title_justify="left")
    table.add_column("part")
    table.add_column("ms", justify="right")
    for name, seconds in row["profile"].items():
        table.add_row(name.replace("_", " "), f"{1000 * seconds:.1f}")
    return table


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """Write bench.json and bench.png."""
    (out / "bench.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(rows, out / "bench.png")


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the seconds of an iteration on a logarithmic axis, with a group of bars for each case."""
    figure = Figure(figsize=(9, 1.2 + 0.85 * len(rows)), layout="constrained")
    axes = figure.subplots()
    height = 0.8 / len(CONTESTANTS)
    for i, (name, (label, colour)) in enumerate(CONTESTANTS.items()):
        places = [r + (i - 1.5) * height for r, row in enumerate(rows) if row[name] is not None]
        values = [row[name] for row in rows if row[name] is not None]
        bars = axes.barh(places, values, height, color=colour, label=label)
        axes.bar_label(bars, [f"{v:.3g} s" for v in values], padding=3, fontsize=7)
    axes.set_yticks(range(len(rows)), [row["case"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.margins(x=0.12)
    axes.set_xlabel("seconds per outer iteration (median of interleaved repeats, logarithmic)")
    axes.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside upper left", ncols=len(CONTESTANTS), fontsize=8, frameon=False)
    figure.savefig(path, dpi=120)


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
