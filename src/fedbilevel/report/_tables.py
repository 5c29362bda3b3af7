"""Tables of runs, made from records only."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table
from rich.text import Text


def ledger_table(summary: dict[str, Any]) -> Table:
    """Rounds, payload and seconds by step, with a line for the total."""
    table = Table(title="Ledger: one row for each kind of round", title_justify="left")
    table.add_column("step")
    for column in ("rounds", "MB up", "MB down", "seconds", "rejected"):
        table.add_column(column, justify="right")
    steps = summary["ledger"]

    def row(name: str, accounts: list[dict[str, Any]]) -> list[str]:
        total = {k: sum(a[k] for a in accounts) for k in accounts[0]}
        return [
            name,
            f"{total['rounds']:,}",
            f"{total['bytes_up'] / 1e6:,.1f}",
            f"{total['bytes_down'] / 1e6:,.1f}",
            f"{total['seconds']:,.1f}",
            f"{total['rejected']:,}",
        ]

    for name, account in steps.items():
        table.add_row(*row(name, [account]))
    if steps:
        table.add_section()
        table.add_row(*row("all", list(steps.values())))
    return table


def outcome_table(summary: dict[str, Any]) -> Table:
    """Rounds, payload and seconds to each accuracy."""
    table = Table(title="What it took to reach an accuracy", title_justify="left")
    for column in ("accuracy", "rounds", "MB up + down", "seconds"):
        table.add_column(column, justify="right")
    for level, rounds in summary["rounds_to"].items():
        if rounds is None:
            table.add_row(f"{float(level):.0%}", "not reached", "", "")
        else:
            size, seconds = summary["bytes_to"][level], summary["seconds_to"][level]
            table.add_row(f"{float(level):.0%}", f"{rounds:,}", f"{size / 1e6:,.1f}", f"{seconds:,.1f}")
    return table


def settings_table(settings: Mapping[str, Any]) -> Table:
    """The settings of a run that a reader wants to see first, with a row for each section."""
    table = Table("setting", "value", title="Settings: all are in spec.toml", title_justify="left")
    for section, values in settings.items():
        text = _told(section, values) if isinstance(values, Mapping) else str(values)
        if text:
            table.add_row(section, Text(text))
    return table


HIGHLIGHTS = {  # the settings of long sections that are shown; of other sections all are
    "data": ("name", "clients", "partition"),
    "federation": ("engine", "aggregator", "weighting", "min_replies"),
    "evaluate": ("every",),
}
OPTIONAL = {"attack": "kind", "privacy": "mode"}  # a section that does nothing unless this is set


def _told(section: str, values: Mapping[str, Any]) -> str:
    if section in OPTIONAL and OPTIONAL[section] not in values:
        return ""
    shown = {key: value for key, value in values.items() if key in HIGHLIGHTS.get(section, values)}
    return ", ".join(
        f"{k} = {v['name'] if isinstance(v, Mapping) and 'name' in v else v}" for k, v in shown.items()
    )


def metrics_table(summary: dict[str, Any]) -> Table:
    """The metrics of a run: at the end, at best, and over the last rounds."""
    table = Table(title=f"Metrics, and their means over the last {summary['accuracy']['window']:,} rounds")
    table.title_justify = "left"
    table.add_column("metric")
    for column in ("last", "best", "mean", "std"):
        table.add_column(column, justify="right")
    for name, figures in summary["metrics"].items():
        texts = ["-" if figures[key] is None else f"{figures[key]:.4g}" for key in ("last", "best", "mean", "std")]
        table.add_row(name, *texts)
    return table


HEADINGS = {
    "rounds_per_iteration": "rounds per iteration",
    "rounds_to_90": "rounds to 90 %",
    "final": "final accuracy",
    "last": "last evaluation",
    "best": "best",
    "swing": "swing (std)",
    "paper_rounds_to_90": "paper: rounds to 90 %",
    "paper_final": "paper: final",
    "bytes_up": "bytes up",
    "bytes_down": "bytes down",
    "gradient_samples": "samples: gradients",
    "product_samples": "samples: products",
    "paper_loops": "paper: loops",
    "paper_samples": "paper: samples",
}
FILES_ONLY = ("last", "best", "minutes", "formula", "paper_loops", "paper_samples")
SHARES = ("accuracy", "final", "last", "best", "swing", "paper_final")


def cells(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Rows of a study as headings and texts; a row may lack a column."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return [HEADINGS.get(c, c) for c in columns], [[_text(c, row.get(c)) for c in columns] for row in rows]


def markdown_table(rows: list[dict[str, Any]]) -> str:
    """Rows of a study as a Markdown table."""
    header, lines = cells(rows)
    table = [header, ["---"] * len(header), *lines]
    return "\n".join("| " + " | ".join(line) + " |" for line in table)


def csv_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as CSV. A column that a row does not have is empty there."""
    stream = io.StringIO()
    fields = list(dict.fromkeys(key for row in rows for key in row))
    writer = csv.DictWriter(stream, fields, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


def study_table(title: str, rows: list[dict[str, Any]]) -> Table:
    """Rows of a study for the terminal, without the columns that only the files need."""
    header, lines = cells([{k: v for k, v in row.items() if k not in FILES_ONLY} for row in rows])
    table = Table(*header, title=title, title_justify="left")
    for line in lines:
        table.add_row(*line)
    return table


def _text(column: str, value: Any) -> str:
    if value is None:
        return "not reached" if column == "rounds_to_90" else "-"
    if column in SHARES:
        return f"{value:.2%}"
    if isinstance(value, float):
        return f"{value:,.2f}".rstrip("0").rstrip(".")
    return f"{value:,}" if isinstance(value, int) else str(value)
