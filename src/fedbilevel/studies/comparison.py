"""Comparing methods and controls on an application: tune each alike, run the seeds, and write the page.

The rule, for every row alike: the same data, budget of rounds and cohort; the same number of points, tried with
one seed and chosen by a metric of validation rows; and then other seeds of the chosen point. The first line of
the page says where a bilevel method is behind a control.
"""

from __future__ import annotations

import csv
import io
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from ..errors import SettingsError
from ..files import results_folder
from ..record import better, direction, in_window
from ..report import (
    Course,
    Scored,
    Truthful,
    draw_controls,
    draw_over_time,
    draw_quality,
    markdown_table,
)
from ..spec import Spec
from .application import TUNING, Application, Column, Row
from .kept import keep, take
from .quality import cosine_of
from .runner import Clock, Runs
from .tune import alone, do_runs_or_alone

SEEDS = 5  # of the chosen point
SHARES = ("accuracy", "auc", "precision", "recall")  # metrics that are shares, and are shown in per cent


@dataclass
class Cell:
    """A row in a column.

    chosen    the point that was chosen; None if all diverged
    tried     the value of `select` at each point; None if it diverged
    specs     the runs of the chosen point, as they were run
    values    the metrics of the table at the end of each of them; None if it diverged
    cosine    between the way of x and the true hypergradient, if the application asks for it
    missing   whether runs of it are missing, so that nothing is known of it
    at_bytes  the metric of the table of each run, after the bytes of the row in its column that sends least
    """

    row: Row
    column: Column
    tried: list[float | None] = field(default_factory=list)
    chosen: dict[str, Any] | None = None
    specs: list[Spec] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    cosine: float | None = None
    at_bytes: list[float] = field(default_factory=list)
    missing: bool = False

    def mean(self, metric: str) -> float | None:
        """The mean over the seeds; None if a seed lacks the metric."""
        known = self._known(metric)
        return None if known is None else float(np.mean(known))

    def deviation(self, metric: str) -> float:
        """The standard deviation of the seeds, with n - 1."""
        known = self._known(metric)
        return float(np.std(known, ddof=1)) if known is not None and len(known) > 1 else 0.0

    def _known(self, metric: str) -> list[float] | None:
        values = self.values.get(metric, [])
        known = [value for value in values if value is not None]
        return known if known and len(known) == len(values) else None


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
    for row, column in application.cells:
        start = time.monotonic()
        try:
            cell = _cell(application, row, column, seeds, runs, jobs, console, kept, finished)
        except _Missing:
            cell = Cell(row, column, missing=True)
        cells.append(cell)
        progress.tell(f"{column.label}, {row.label}: {shown(cell, application.metric)}", time.monotonic() - start)
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
    _write(application, cells, seeds, out, runs)
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
) -> Cell:
    """Try the points of a row in a column, and run the chosen one with the other seeds."""

    def do(specs: list[Spec]) -> list[Spec]:
        if kept is not None:
            for each in (specs, [alone(spec) for spec in specs]):
                take(runs, each, kept)
        done = [alone(s) if runs.share(alone(s)) == 1.0 else s for s in specs]  # an earlier run may be alone
        if finished and any(runs.share(spec) < 1.0 for spec in done):
            raise _Missing
        done = do_runs_or_alone(done, runs, jobs=jobs, console=console)
        if kept is not None:
            keep(runs, done, kept)
        return done

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


def verdict(application: Application, cells: Sequence[Cell]) -> str:
    """Where a bilevel method is behind the best control, and where it is ahead. An oracle is no control.

    A column in which a control is missing does not count as one in which bilevel is ahead.
    """
    metric, ahead, behind, waiting = application.metric, list[str](), list[str](), list[str]()
    for column in application.columns:
        here = [cell for cell in cells if cell.column == column and cell.mean(metric) is not None]
        own = _leader([cell for cell in here if cell.row.kind == "bilevel"], application)
        control = _leader([cell for cell in here if cell.row.kind == "control"], application)
        if own is None or control is None:
            continue
        apart = abs(own.mean(metric) - control.mean(metric))  # type: ignore[operator]
        little = ", less than a deviation" if apart < max(own.deviation(metric), control.deviation(metric)) else ""
        text = (
            f"{column.label} by {_difference(apart, metric)}{little} ({own.row.label} against {control.row.label})"
        )
        won = better(own.mean(metric), control.mean(metric), application.mode)  # type: ignore[arg-type]
        missing = any(cell.missing and cell.row.kind != "oracle" for cell in cells if cell.column == column)
        (behind if not won else waiting if missing else ahead).append(text)
    rest = f" It is ahead of those controls that were run in {'; '.join(waiting)}." if waiting else ""
    if not ahead and not behind:
        return rest.strip() or "No bilevel method stands beside a control here."
    if not behind:
        where = f"all {len(ahead)} columns" if len(ahead) > 1 else "its column" if not rest else "a column"
        return f"Bilevel is ahead of every control in {where}: {'; '.join(ahead)}.{rest}"
    lost = f"Bilevel is behind its best control in {len(behind)} of {len(ahead + behind + waiting)} columns: "
    return lost + "; ".join(behind) + "." + (f" It is ahead in {'; '.join(ahead)}." if ahead else "") + rest


def _leader(cells: Sequence[Cell], application: Application) -> Cell | None:
    sign = 1.0 if application.mode == "max" else -1.0
    return max(cells, key=lambda cell: sign * (cell.mean(application.metric) or 0.0), default=None)


def is_share(metric: str) -> bool:
    """Whether a metric is a share, which is shown in per cent."""
    return metric.endswith(SHARES)


def _difference(value: float, metric: str) -> str:
    return f"{100 * value:.2f} points" if is_share(metric) else f"{value:.3g}"


def shown(cell: Cell, metric: str) -> str:
    """A mean and its deviation; a dash if the row does not have the metric."""
    mean, deviation = cell.mean(metric), cell.deviation(metric)
    if cell.missing:
        return "not run"
    if mean is None:
        failed = sum(value is None for value in cell.values.get(metric, [])) if cell.chosen else 0
        return "diverged" if cell.chosen is None or (metric.startswith("test") and failed) else "-"
    return f"{100 * mean:.2f} ± {100 * deviation:.2f}" if is_share(metric) else f"{mean:.4g} ± {deviation:.2g}"


def table(application: Application, cells: Sequence[Cell], metric: str) -> list[dict[str, Any]]:
    """The rows of the page for a metric, as texts."""
    made = list[dict[str, Any]]()
    for row in application.rows:
        if metric in application.found and row.kind != "bilevel":
            continue
        own = {cell.column.label: shown(cell, metric) for cell in cells if cell.row == row}
        texts = {column.label: own.get(column.label, "-") for column in application.columns}
        if metric == application.metric or any(text != "-" for text in texts.values()):
            made.append({"": row.label + ("" if row.kind == "control" else f" ({row.kind})"), **texts})
    return made


def _records(application: Application, cells: Sequence[Cell], runs: Runs) -> list[dict[str, Any]]:
    """A record for every cell, for NAME.json and NAME.csv."""
    made = []
    for cell in cells:
        record: dict[str, Any] = {"row": cell.row.label, "kind": cell.row.kind, "column": cell.column.label}
        for metric in application.metrics:
            mean = cell.mean(metric)
            record[metric] = None if mean is None else round(mean, 6)
            record[f"{metric}_deviation"] = None if mean is None else round(cell.deviation(metric), 6)
            record[f"{metric}_seeds"] = cell.values.get(metric, [])
        record["chosen"], record["tried"] = cell.chosen, cell.tried
        record |= {"cosine": cell.cosine} if application.quality else {}
        record |= {"at_equal_bytes": cell.at_bytes} if application.equal_bytes else {}
        if cell.specs:
            ends = [runs.history(spec)[-1] for spec in cell.specs]
            clients = cell.specs[0].data.clients
            record["rounds"] = ends[0]["rounds"]
            record["megabytes_a_client"] = round((ends[0]["bytes_up"] + ends[0]["bytes_down"]) / 1e6 / clients, 3)
            record["seconds"] = round(float(np.mean([end["seconds"] for end in ends])), 2)
        made.append(record)
    return made


def _write(application: Application, cells: Sequence[Cell], seeds: int, out: Path, runs: Runs) -> None:
    name, records = application.name, _records(application, cells, runs)
    made = [runs.of(spec).environment()["revision"] for cell in cells for spec in cell.specs]
    revision = ", ".join(dict.fromkeys(map(str, made)))
    command = f"fedbilevel reproduce {name} --seeds {seeds}" + (
        f" --share {application.share:g}" if application.share < 1 else ""
    )
    short = " SHORT: not all of the rounds were run." if application.share < 1 else ""
    if missing := sum(cell.missing for cell in cells):
        short += f" UNFINISHED: {missing} of {len(cells)} cells have not been run yet, and are in no verdict."
    rule = (
        f"Means and standard deviations of {seeds} seeds. Of every row {application.points} points were tried in "
        f"every column with a further seed, and the best by {_words(application.select)} was taken.{short}"
    )
    parts = [
        f"# {application.title}",
        f"**{verdict(application, cells)}**",
        application.note.strip(),
        rule,
        f"`{command}`, revision {revision}.",
        f"## {_words(application.metric).capitalize()}" + (", per cent" if is_share(application.metric) else ""),
        markdown_table(table(application, cells, application.metric)),
        f"![{application.title}]({name}.png)",
    ]
    for metric in application.metrics[1:]:
        if rows := table(application, cells, metric):
            unit = ", per cent" if is_share(metric) else ""
            parts += [f"## {_words(metric).capitalize()}{unit}", markdown_table(rows)]
    if application.over_time and (courses := _courses(application, cells, runs)):
        own = next(row for row in application.rows if row.kind == "bilevel")
        draw_over_time(
            courses, application.over_time, f"{application.title}\n{own.label}", out / f"{name}-time.png"
        )
        parts += [f"## Over time: {own.label}", f"![Over time]({name}-time.png)"]
    if application.equal_bytes:
        title = f"## {_words(application.metric).capitalize()} at equal bytes"
        parts += [
            title + (", per cent" if is_share(application.metric) else ""),
            _columns(application, cells, _bytes_text),
        ]
    if application.quality:
        parts += ["## What it buys", *bought(application, cells)]
        parts += [
            "## Cosine of the way of x and the true hypergradient",
            _columns(application, cells, _cosine_text),
        ]
        drawn = [
            Truthful(
                c.row.label,
                c.row.kind,
                c.column.label,
                c.cosine,
                mean,
                float(np.mean(c.at_bytes)) if c.at_bytes else None,
            )
            for c in cells
            if c.cosine is not None and (mean := c.mean(application.metric)) is not None
        ]
        labels = [column.label for column in application.columns]
        draw_quality(
            drawn, labels, _words(application.metric), is_share(application.metric), out / f"{name}-quality.png"
        )
        parts[parts.index(f"![{application.title}]({name}.png)")] = f"![{application.title}]({name}-quality.png)"
    parts += ["## The settings that were chosen, and what a run costs", markdown_table(_costs(records))]
    (out / f"{name}.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    (out / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    (out / f"{name}.csv").write_text(_csv(records))
    compared = [
        Scored(c.row.label, c.row.kind, c.column.label, mean, c.deviation(application.metric))
        for c in cells
        if (mean := c.mean(application.metric)) is not None
    ]
    if not compared:
        raise SettingsError(f"{name}: every run diverged; its page has no picture")
    draw_controls(
        compared,
        list(dict.fromkeys(each.column for each in compared)),
        _words(application.metric),
        is_share(application.metric),
        application.title,
        out / f"{name}.png",
    )


def bought(application: Application, cells: Sequence[Cell]) -> list[str]:
    """What a truer hypergradient bought, a paragraph for each column in which at least two rows were run."""
    made = []
    for column in application.columns:
        here = [c for c in cells if c.column == column and c.cosine is not None and c.mean(application.metric)]
        best = _leader(here, application)
        if best is None or len(here) < 2:
            continue
        least, most = (choose(here, key=lambda cell: cell.cosine or 0.0) for choose in (min, max))
        ends = [f"{each.cosine:.2f}), which ends at {shown(each, application.metric)}" for each in (least, most)]
        sentences = [
            f"**{column.label}.** The least true direction is that of {least.row.label} (cosine {ends[0]}, and "
            f"the truest that of {most.row.label} ({ends[1]}.",
            f"The best at equal rounds is {best.row.label} ({best.cosine:.2f}) with "
            f"{shown(best, application.metric)}.",
        ]
        if known := [cell for cell in here if cell.at_bytes]:
            sign = 1.0 if application.mode == "max" else -1.0
            thrifty = max(known, key=lambda cell: sign * float(np.mean(cell.at_bytes)))
            sentences.append(
                f"At equal bytes it is {thrifty.row.label} with {_bytes_text(thrifty, application)}, and the "
                f"truest has {_bytes_text(most, application)} there."
            )
        made.append(" ".join(sentences))
    return made


def _courses(application: Application, cells: Sequence[Cell], runs: Runs) -> list[Course]:
    """The metrics of `over_time` of the first bilevel row, in every column and for every seed."""
    first = next((row for row in application.rows if row.kind == "bilevel"), None)
    made = []
    for cell in (each for each in cells if each.row == first):
        for history in map(runs.history, cell.specs):
            for metric in application.over_time:
                known = [(r["rounds"], r[metric]) for r in history if r.get(metric) is not None]
                if known:
                    made.append(Course(cell.column.label, metric, *zip(*known, strict=True)))
    return made


def _columns(application: Application, cells: Sequence[Cell], text: Callable[[Cell, Application], str]) -> str:
    """A table with a text for every cell."""
    made = []
    for row in application.rows:
        own = {cell.column.label: text(cell, application) for cell in cells if cell.row == row}
        made.append(
            {"": row.label, **{column.label: own.get(column.label, "-") for column in application.columns}}
        )
    return markdown_table(made)


def _bytes_text(cell: Cell, application: Application) -> str:
    if not cell.at_bytes:
        return "-"
    read = Cell(cell.row, cell.column, chosen={}, values={application.metric: [*cell.at_bytes]})
    return shown(read, application.metric)


def _cosine_text(cell: Cell, application: Application) -> str:
    return "-" if cell.cosine is None else f"{cell.cosine:.3f}"


def _costs(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            "column": record["column"],
            "row": record["row"],
            "settings": ", ".join(
                f"{key.rpartition('.')[2]} {value}" for key, value in (record["chosen"] or {}).items()
            ),
            "rounds": record.get("rounds"),
            "MB a client": record.get("megabytes_a_client"),
            "seconds": record.get("seconds"),
        }
        for record in records
    ]


def _words(metric: str) -> str:
    return metric.replace("valid_", "validation ").replace("_", " ")


def _csv(records: Sequence[dict[str, Any]]) -> str:
    """The records without the lists, one line each."""
    plain = [
        {key: value for key, value in record.items() if not isinstance(value, list | dict)} for record in records
    ]
    stream = io.StringIO()
    fields = list(dict.fromkeys(key for record in plain for key in record))
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain)
    return stream.getvalue()
