"""One self-contained page for many runs: problems and axes to switch between, curves, tables to sort, and ranks.

The page has its data as JSON and makes everything from them with its own script (`board.js`). Texts that come from
specs or from the names of folders are only ever set as text, never as markup, and the page may load nothing.
"""

from __future__ import annotations

import html
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

from ..record import Mode

POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


class BoardAxis(Protocol):
    """What runs are measured against: the key of its numbers, and what they are."""

    @property
    def key(self) -> str: ...

    @property
    def label(self) -> str: ...


@dataclass(frozen=True)
class Reached:
    """When runs reach a target for good.

    at          the median place on each axis; None if most runs do not
    there       how many of the runs do
    runs        how many there are
    forbidden   whether the floor of the method is above the target, so that more rounds would not help
    """

    at: Mapping[str, float] | None
    there: int
    runs: int
    forbidden: bool = False


@dataclass(frozen=True)
class BoardEntry:
    """A line of a table and a curve.

    spec       the spec of its runs, as TOML
    settings   the settings that were chosen
    note       what else has to be said of it
    facts      further columns of the table
    curve      x: the places on each axis; low, mid and high: the 20, 50 and 80 % quantiles of the metric
    """

    label: str
    control: bool = False
    spec: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)
    curve: Mapping[str, Any] | None = None
    reached: Sequence[Reached] = ()


@dataclass(frozen=True)
class BoardTable:
    """A problem: its metric, which direction of it is better, its targets, and the methods on it."""

    name: str
    title: str
    metric: str
    mode: Mode
    log: bool
    targets: Sequence[float]
    entries: Sequence[BoardEntry]
    note: str = ""


@dataclass(frozen=True)
class Board:
    """Everything on a page."""

    title: str
    remark: str
    axes: Sequence[BoardAxis]
    tables: Sequence[BoardTable]


def write_board(path: Path, board: Board) -> None:
    """Write the page."""
    path.write_text(board_page(board), encoding="utf-8")


def board_page(board: Board) -> str:
    """The page as text."""
    data = {
        "axes": [{"key": axis.key, "label": axis.label} for axis in board.axes],
        "tables": [asdict(table) for table in board.tables],
    }
    folder = resources.files("fedbilevel.report")
    style, script = ((folder / name).read_text(encoding="utf-8") for name in ("board.css", "board.js"))
    # A text that closes the element would end the data, so no "<" is left in them.
    embedded = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    return f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>fedbilevel: {html.escape(board.title)}</title><link rel="icon" href="data:,"><style>{style}</style></head>
<body><h1>{html.escape(board.title)}</h1>
<p class="remark">{html.escape(board.remark)}</p>
<main id="board"><noscript>This page needs JavaScript, which is part of it; it loads nothing.</noscript></main>
<dialog id="spec"><form method="dialog"><h2></h2><button>Close</button></form><pre></pre></dialog>
<script type="application/json" id="data">{embedded}</script>
<script>{script}</script></body></html>
"""
