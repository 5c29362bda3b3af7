"""A table of the data sets, and a table and a picture of how labels are spread over clients."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.table import Table
from rich.text import Text

from ..errors import DataUnavailable, FedBilevelError
from ._cache import cache_folder
from ._catalogue import DATASETS, Entry, find
from ._loading import load
from ._partition import Drawn, Partition

COUNTED = 10_000  # Only the first clients, up to this number, are counted.
DRAWN = 200  # more bars than this cannot be told apart in one picture


def dataset_table() -> Table:
    """The data sets by name, with their rows and classes, and whether their files are in the cache."""
    table = Table("name", "rows", "classes", "in the cache", title=f"Data sets; cache: {cache_folder()}")
    for name in DATASETS:
        table.add_row(name, *map(Text, _rows_and_state(name)))
    return table


def _rows_and_state(name: str) -> tuple[str, str, str]:
    try:
        found, dataset = find(name), load(name, offline=True)
    except FedBilevelError as error:
        return "", "", "no" if isinstance(error, DataUnavailable) else f"unusable: {error}"
    rows = f"{len(dataset.train_targets):,} + {len(dataset.test_targets):,}"
    if not isinstance(found, Entry):
        return rows, str(dataset.classes), "made by a function"
    return rows, str(dataset.classes), "yes" if found.files else "embedded"


def label_counts(
    targets: npt.ArrayLike, partition: Partition | Drawn, classes: int, *, first: int | None = None
) -> npt.NDArray[np.int64]:
    """The number of rows of every label (columns) at the first clients (rows), both parts together."""
    labels, clients = np.asarray(targets), range(min(COUNTED if first is None else first, partition.clients))
    counts = [np.bincount(labels[partition.rows(i)], minlength=classes) for i in clients]
    return np.asarray(counts, np.int64)


def label_table(targets: npt.ArrayLike, partition: Partition | Drawn, classes: int, *, show: int = 5) -> Table:
    """Rows and labels per client, as minimum, median and maximum, and the labels of the first `show` clients."""
    counts = label_counts(targets, partition, classes)
    totals, sizes = counts.sum(axis=1), np.asarray([partition.size(i) for i in range(len(counts))])
    note = f" (the first {len(counts):,} counted)" if len(counts) < partition.clients else ""
    title = f"{len(np.asarray(targets)):,} rows, {classes} classes, {partition.clients:,} clients{note}"
    summary = Table("", title=title)
    for column in ("min", "median", "max"):
        summary.add_column(column, justify="right")
    for name, figures, form in (
        ("rows per client", totals, "{:,.0f}"),
        ("  lower part", sizes[:, 0], "{:,.0f}"),
        ("  upper part", sizes[:, 1], "{:,.0f}"),
        ("labels per client", (counts > 0).sum(axis=1), "{:.0f}"),
        ("share of largest class", counts.max(axis=1) / totals, "{:.0%}"),
    ):
        summary.add_row(name, *(form.format(f(figures)) for f in (np.min, np.median, np.max)))
    first = Table("client", "label:rows")
    for client, held in enumerate(counts[:show].tolist()):
        first.add_row(str(client), "  ".join(f"{label}:{n}" for label, n in enumerate(held) if n))
    both = Table.grid()
    both.add_row(summary)
    both.add_row(first)
    return both


def draw_labels(
    path: str | Path,
    targets: npt.ArrayLike,
    partition: Partition | Drawn,
    classes: int,
    *,
    dataset: str,
    kind: str,
) -> Path:
    """Draw the labels by client, one stacked bar for each; the suffix of `path` gives the format."""
    from matplotlib import colormaps
    from matplotlib.collections import PolyCollection
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    counts = label_counts(targets, partition, classes, first=DRAWN)
    drawn, left = len(counts), np.arange(len(counts)) - 0.425
    colours = (
        colormaps["tab10"].colors  # type: ignore[attr-defined]
        if classes <= 10
        else colormaps["turbo"](np.linspace(0.05, 0.95, classes))
    )
    figure = Figure(figsize=(min(6 + drawn / 20, 12), 4), layout="constrained")
    axes = figure.add_subplot()
    bottom = np.zeros(drawn)
    for label in range(classes):
        top = bottom + counts[:, label]
        corners = ((left, bottom), (left, top), (left + 0.85, top), (left + 0.85, bottom))
        bars = np.stack([np.column_stack(corner) for corner in corners], axis=1)
        axes.add_collection(PolyCollection(list(bars), facecolor=colours[label], linewidth=0, label=str(label)))
        bottom = top
    note = f" (first {drawn} shown)" if drawn < partition.clients else ""
    axes.set_title(f"{dataset}, {kind} partition, {partition.clients:,} clients{note}", loc="left")
    axes.set_xlabel("client")
    axes.set_ylabel("rows")
    axes.set_xlim(-0.6, drawn - 0.4)
    axes.set_ylim(0, 1.05 * bottom.max())
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    handles, names = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        names[::-1],
        title="label",
        loc="outside right upper",
        frameon=False,
        ncols=1 + (classes - 1) // 15,
    )
    figure.savefig(path, dpi=150)
    return Path(path)
