"""Comparing methods and controls on an application: tune each alike, run the seeds, and write the page.

The rule, for every row alike: the same data, budget of rounds and cohort; the same number of points, tried with
one seed and chosen by a metric of validation rows; and then other seeds of the chosen point.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from ..errors import SettingsError
from ..files import results_folder
from ..record import better, direction, in_window
from ..spec import Spec
from .application import TUNING, Application, Column, Row
from .cells import Cell, shown
from .comparison_page import write_page
from .kept import keep, take
from .quality import cosine_of
from .runner import Clock, Runs, Workers
from .tune import alone, do_runs_or_alone, without_data

SEEDS = 5  # of the chosen point


class _Missing(Exception):
    """A run is not there."""


def compare(
    application: Application,
    *,
    seeds: int,
    out: Path,
    runs: Runs,
    jobs: int,
    console: Console,
    kept: Path | None = None,
    finished: bool = False,
) -> list[Cell]:
    """Do the missing runs; write NAME.md, .json, .csv and .png to `out`; return the cells.

    Finished runs are taken from the folder `kept`, and are added to it after every cell. With `finished` nothing
    is run: the page has the cells whose runs are all there, and says how many others there are.
    """
    results_folder(out, "--out")
    progress, cells = Clock(len(application.cells), console), list[Cell]()
    with Workers(runs, jobs) as workers:
        for row, column in application.cells:
            start = time.monotonic()
            try:
                cell = _cell(application, row, column, seeds, runs, jobs, console, kept, finished, workers)
            except _Missing:
                cell = Cell(row, column, missing=True)
            cells.append(cell)
            told = f"{column.label}, {row.label}: {shown(cell, application.metric)}"
            progress.tell(told, time.monotonic() - start)
    if all(cell.missing for cell in cells):
        raise SettingsError(
            f"{application.name}: no row of it has been run to its end, so there is nothing to write; "
            "leave --finished out to run it, or name the folder of its runs by --keep"
        )
    if application.equal_bytes:
        for column in application.columns:
            _at_equal_bytes(
                [c for c in cells if c.column == column and c.mean(application.metric)], application, runs
            )
    write_page(application, cells, seeds, out, runs)
    return cells


def _at_equal_bytes(cells: Sequence[Cell], application: Application, runs: Runs) -> None:
    """Read the metric of every run at the bytes that the cheapest row of the column has sent at its end."""
    histories = [[runs.history(spec) for spec in cell.specs] for cell in cells]
    ends = [history[-1]["bytes_up"] + history[-1]["bytes_down"] for own in histories for history in own]
    for cell, own in zip(cells, histories, strict=True):
        for history in own:
            within = [record for record in history if record["bytes_up"] + record["bytes_down"] <= min(ends)]
            cell.at_bytes.append(float(within[-1][application.metric]))


def _cell(
    application: Application,
    row: Row,
    column: Column,
    seeds: int,
    runs: Runs,
    jobs: int,
    console: Console,
    kept: Path | None,
    finished: bool,
    workers: Workers,
) -> Cell:
    """Try the points of a row in a column, and run the chosen one with the other seeds."""

    def do(specs: list[Spec]) -> list[Spec]:
        if kept is not None:
            for each in (specs, [alone(spec) for spec in specs]):
                take(runs, each, kept)
        done = [alone(s) if runs.share(alone(s)) == 1.0 else s for s in specs]  # an earlier run may be alone
        if finished and any(runs.share(spec) < 1.0 for spec in done):
            raise _Missing
        done = do_runs_or_alone(done, runs, jobs=jobs, console=console, workers=workers)
        if kept is not None:
            keep(runs, done, kept)
        return [without_data(spec) for spec in done]

    cell, points = Cell(row, column), row.points(column)
    tried = do([application.of(row, column, point, TUNING) for point in points])
    cell.tried = [_end(runs, spec, application.select) for spec in tried]
    if all(value is None for value in cell.tried):
        return cell
    cell.chosen = points[best_of(cell.tried, application)]
    cell.specs = do([application.of(row, column, cell.chosen, TUNING + 1 + seed) for seed in range(seeds)])
    for metric in application.metrics:
        cell.values[metric] = [_end(runs, spec, metric) for spec in cell.specs]
    if application.quality and cell.mean(application.metric) is not None:
        cell.cosine = _cosine(cell.specs[0], runs)
    return cell


def _cosine(spec: Spec, runs: Runs) -> float:
    """The cosine of a run, which is kept beside the runs, as it takes as long as one of them."""
    file = runs.folder / f"{spec.digest}.cosine.json"
    if not file.exists():
        file.write_text(json.dumps(cosine_of(spec)))
    return float(json.loads(file.read_text()))


def best_of(values: Sequence[float | None], application: Application) -> int:
    """The place of the best value by the metric of the choice; the first one among equals."""
    mode = direction(application.select)
    sound = [place for place, value in enumerate(values) if value is not None]
    best = sound[0]
    for place in sound[1:]:
        if better(values[place], values[best], mode):  # type: ignore[arg-type]
            best = place
    return best


def _end(runs: Runs, spec: Spec, metric: str) -> float | None:
    """A metric at the end of a run, as a mean over `evaluate.window`; None if the run diverged."""
    if runs.failure(spec) is not None:
        return None
    history = runs.history(spec)
    return in_window(history, metric, spec.evaluate.window)["mean"]
