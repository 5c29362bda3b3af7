"""Figures and tables from records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console
from rich.table import Table

from fedbilevel.report import draw_curve, ledger_table, outcome_table, text_curve

PNG = b"\x89PNG\r\n\x1a\n"
ACCOUNT = {"rounds": 3, "bytes_up": 2_500_000, "bytes_down": 1_000_000, "seconds": 1.25, "rejected": 1}
SUMMARY: dict[str, Any] = {
    "ledger": {"gradients": ACCOUNT, "upper_steps": ACCOUNT | {"rounds": 4}},
    "rounds_to": {"0.80": 1500, "0.90": None},
    "bytes_to": {"0.80": 3_000_000, "0.90": None},
    "seconds_to": {"0.80": 2.5, "0.90": None},
}


def curve(kind: str, count: int = 30) -> list[dict[str, Any]]:
    more: list[dict[str, Any]] = [{"test_accuracy": None} for _ in range(count)]
    if kind.startswith("accuracy"):
        top = 0.98 if "reached" in kind else 0.7
        start = 20 if "late" in kind else 1
        more = [{"test_accuracy": top if i > start else 0.2} for i in range(count)]
    elif kind == "hypergradient":
        more = [{"test_accuracy": None, "hypergradient_norm": 10.0**-i} for i in range(count)]
    return [{"rounds": 5 * i, "upper_loss": 1.0 / (i + 1), **m} for i, m in enumerate(more)]


@pytest.mark.parametrize(
    "kind", ["accuracy", "accuracy reached", "accuracy reached late", "hypergradient", "losses only"]
)
def test_the_curve_of_every_kind_of_history_is_a_picture_that_is_not_empty(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "curve.png"
    draw_curve(curve(kind), path, "a title")
    assert path.read_bytes().startswith(PNG)
    with Image.open(path) as picture:
        colours: Any = picture.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    ink = sum(count for count, (red, _, blue) in colours if blue > red + 40)
    assert ink > 100  # the curve itself, in its blue


def test_the_three_kinds_of_curve_differ(tmp_path: Path) -> None:
    pictures = set()
    for kind in ("accuracy", "hypergradient", "losses only"):
        draw_curve(curve(kind), tmp_path / "curve.png", "a title")
        pictures.add((tmp_path / "curve.png").read_bytes())
    assert len(pictures) == 3


@pytest.mark.parametrize("kind", ["accuracy", "hypergradient", "losses only"])
def test_a_run_of_no_iterations_has_a_curve_too(kind: str, tmp_path: Path) -> None:
    draw_curve(curve(kind, 1), tmp_path / "curve.png", "a title")
    assert (tmp_path / "curve.png").read_bytes().startswith(PNG)


def cells(table: Table) -> list[list[str]]:
    """The rows of a table, each as the text of its cells."""
    return [list(row) for row in zip(*([str(c) for c in column.cells] for column in table.columns), strict=True)]


def test_the_ledger_has_a_row_a_step_and_a_total() -> None:
    assert cells(ledger_table(SUMMARY)) == [
        ["gradients", "3", "2.5", "1.0", "1.2", "1"],
        ["upper_steps", "4", "2.5", "1.0", "1.2", "1"],
        ["all", "7", "5.0", "2.0", "2.5", "2"],
    ]


def test_the_ledger_of_a_run_that_did_nothing_has_no_rows() -> None:
    table = ledger_table({"ledger": {}})
    assert table.row_count == 0
    Console(width=80, quiet=True).print(table)


def test_the_outcome_says_what_each_accuracy_took_and_which_was_not_reached() -> None:
    assert cells(outcome_table(SUMMARY)) == [["80%", "1,500", "3.0", "2.5"], ["90%", "not reached", "", ""]]


def test_the_curve_in_characters_rises_with_the_accuracy() -> None:
    text = text_curve([{"rounds": 10 * i, "test_accuracy": i / 10} for i in range(11)], width=20, height=5)
    *rows, axis, foot = text.splitlines()
    first = [next(i for i, c in enumerate(row[6:]) if c != " ") for row in rows]
    assert len(rows) == 5
    assert first == sorted(first, reverse=True)
    assert len(set(first)) == 5
    assert axis.startswith("  0%")
    assert foot.endswith("100 rounds")


def test_the_curve_in_characters_shows_a_loss_without_accuracies_and_nothing_with_one_evaluation() -> None:
    assert text_curve(curve("losses only")).startswith("upper loss\n")
    assert text_curve(curve("accuracy", 1)) == ""
