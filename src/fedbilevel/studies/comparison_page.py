"""The page of an application: its verdict, its tables and figures, and its records for other programs.

The first line says where a bilevel method is behind a control.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import SettingsError
from ..record import better
from ..report import (
    Course,
    Scored,
    Truthful,
    csv_table,
    draw_controls,
    draw_over_time,
    draw_quality,
    markdown_table,
)
from .application import Application
from .cells import Cell, is_share, leader, shown
from .runner import Runs


def verdict(application: Application, cells: Sequence[Cell]) -> str:
    """Where a bilevel method is behind the best control, and where it is ahead. An oracle is no control.

    A column in which a control is missing does not count as one in which bilevel is ahead.
    """
    metric, ahead, behind, waiting = application.metric, list[str](), list[str](), list[str]()
    for column in application.columns:
        here = [cell for cell in cells if cell.column == column and cell.mean(metric) is not None]
        own = leader([cell for cell in here if cell.row.kind == "bilevel"], application)
        control = leader([cell for cell in here if cell.row.kind == "control"], application)
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


def _difference(value: float, metric: str) -> str:
    return f"{100 * value:.2f} points" if is_share(metric) else f"{value:.3g}"


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


def write_page(application: Application, cells: Sequence[Cell], seeds: int, out: Path, runs: Runs) -> None:
    """Write NAME.md, .json, .csv and the figures."""
    name, records = application.name, _records(application, cells, runs)
    compared = [
        Scored(c.row.label, c.row.kind, c.column.label, mean, c.deviation(application.metric))
        for c in cells
        if (mean := c.mean(application.metric)) is not None
    ]
    parts = [*_head(application, cells, seeds, runs), *_tables(application, cells)]
    if application.over_time and (courses := _courses(application, cells, runs)):
        own = next(row for row in application.rows if row.kind == "bilevel")
        draw_over_time(
            courses, application.over_time, f"{application.title}\n{own.label}", out / f"{name}-time.png"
        )
        parts += [f"## Over time: {own.label}", f"![Over time]({name}-time.png)"]
    if application.equal_bytes:
        title = f"{_title(application.metric)} at equal bytes{_unit(application.metric)}"
        parts += [f"## {title}", _columns(application, cells, _bytes_text)]
    if application.quality:
        parts += ["## What it buys", *bought(application, cells)]
        title = "Cosine of the way of x and the true hypergradient"
        parts += [f"## {title}", _columns(application, cells, _cosine_text)]
        _draw_quality(application, cells, out)
    parts += ["## The settings that were chosen, and what a run costs", markdown_table(_costs(records))]
    (out / f"{name}.md").write_text("\n\n".join(part for part in parts if part) + "\n")
    (out / f"{name}.json").write_text(json.dumps(records, indent=1) + "\n")
    (out / f"{name}.csv").write_text(csv_table([_plain(record) for record in records]))
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


def _head(application: Application, cells: Sequence[Cell], seeds: int, runs: Runs) -> list[str]:
    """Title, verdict, the note of the application, how it was run, and by which command."""
    made = [runs.of(spec).environment()["revision"] for cell in cells for spec in cell.specs]
    revision = ", ".join(dict.fromkeys(map(str, made)))
    command = f"fedbilevel reproduce {application.name} --seeds {seeds}" + (
        f" --share {application.share:g}" if application.share < 1 else ""
    )
    short = " SHORT: not all of the rounds were run." if application.share < 1 else ""
    if missing := sum(cell.missing for cell in cells):
        short += f" UNFINISHED: {missing} of {len(cells)} cells have not been run yet, and are in no verdict."
    rule = (
        f"Means and standard deviations of {seeds} seeds. Of every row {application.points} points were tried in "
        f"every column with a further seed, and the best by {_words(application.select)} was taken.{short}"
    )
    return [
        f"# {application.title}",
        f"**{verdict(application, cells)}**",
        application.note.strip(),
        rule,
        f"`{command}`, revision {revision}.",
    ]


def _tables(application: Application, cells: Sequence[Cell]) -> list[str]:
    """The table of the metric with its figure, and the tables of what else was measured."""
    figure = f"{application.name}-quality.png" if application.quality else f"{application.name}.png"
    parts = list[str]()
    for metric in application.metrics:
        first = metric == application.metric
        if (rows := table(application, cells, metric)) or first:
            parts += [f"## {_title(metric)}{_unit(metric)}", markdown_table(rows)]
        if first:
            parts.append(f"![{application.title}]({figure})")
    return parts


def _draw_quality(application: Application, cells: Sequence[Cell], out: Path) -> None:
    """The figure of the metric against the quality of the hypergradient."""
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
    labels, metric = [column.label for column in application.columns], application.metric
    draw_quality(drawn, labels, _words(metric), is_share(metric), out / f"{application.name}-quality.png")


def bought(application: Application, cells: Sequence[Cell]) -> list[str]:
    """What a truer hypergradient bought, a paragraph for each column in which at least two rows were run."""
    made = []
    for column in application.columns:
        here = [c for c in cells if c.column == column and c.cosine is not None and c.mean(application.metric)]
        best = leader(here, application)
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


def _title(metric: str) -> str:
    return _words(metric).capitalize()


def _unit(metric: str) -> str:
    return ", per cent" if is_share(metric) else ""


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    """A record without its lists and tables."""
    return {key: value for key, value in record.items() if not isinstance(value, list | dict)}
