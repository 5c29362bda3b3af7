"""Applications and their controls: equal budgets, a choice by validation rows, a page that says who is behind."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbilevel.errors import SettingsError, UnknownName
from fedbilevel.studies import Application, Runs, application_names, comparison, load_application, load_study
from fedbilevel.studies.application import read_application
from fedbilevel.studies.cells import Cell
from fedbilevel.studies.comparison import best_of, compare
from fedbilevel.studies.comparison_page import verdict
from fedbilevel.studies.tune import without_data

QUIET = Console(quiet=True)
SMALL = """
title = "Small"
spec = "client-weights"
metric = "test_accuracy"
select = "valid_accuracy"
also = ["test_loss"]
found = ["auc"]
over_time = { weight_good = "good clients" }
points = 2
note = "A note."
[common]
"data.name" = "digits"
"data.clients" = 10
"problem.components" = 20
"problem.rows" = 40
"problem.checked" = 6
"problem.valid" = 30
"stop.rounds" = 40
"evaluate.window" = 10
"algorithm.participation" = 1.0
[[columns]]
label = "half bad"
set = { "problem.bad" = 0.5 }
[[rows]]
label = "weights"
kind = "bilevel"
set = { "algorithm.name" = "fedsoba" }
tries = { "algorithm.alpha" = [1e-6, 30.0] }
[[rows]]
label = "alike"
set = { "algorithm.name" = "fedavg", "algorithm.control" = "lower-only" }
tries = { "algorithm.beta" = [1e-6, 0.5] }
[[rows]]
label = "geometric median"
columns = ["half bad"]
tries = { "algorithm.beta" = [1e-6, 0.5] }
[rows.set]
"algorithm.name" = "fedavg"
"algorithm.control" = "lower-only"
"federation.aggregator" = "geometric-median"
"""


def small() -> Application:
    return read_application(SMALL, "small")


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs, list[Cell]]:
    folder = tmp_path_factory.mktemp("compared")
    runs = Runs(folder / "runs")
    how: dict[str, Any] = dict(seeds=2, runs=runs, jobs=1, console=QUIET, kept=folder / "kept")
    return folder, runs, compare(small(), out=folder / "out", **how)


@pytest.mark.parametrize("name", application_names())
def test_every_application_loads_and_no_choice_is_made_by_test_rows(name: str) -> None:
    made = load_application(name)
    assert made.rows and made.columns and not made.select.startswith("test")
    assert any(row.kind == "bilevel" for row in made.rows) and any(row.kind == "control" for row in made.rows)


def test_settings_are_chosen_by_validation_rows_with_a_seed_that_the_table_lacks(
    compared: tuple[Path, Runs, list[Cell]],
) -> None:
    _, runs, cells = compared
    for cell in cells:
        assert (
            cell.chosen == cell.row.points(cell.column)[1] and len(cell.tried) == 2
        )  # the first step size is far too small
        assert [spec.seed for spec in cell.specs] == [1, 2]
        for place, spec in enumerate(cell.specs):
            ends = [r["test_accuracy"] for r in runs.history(spec) if r["rounds"] > 30]
            assert cell.values["test_accuracy"][place] == pytest.approx(sum(ends) / len(ends), abs=1e-5)
    assert [type(cell.specs[0].federation.engine).__name__ for cell in cells] == [
        "FusedSettings",
        "FusedSettings",
        "SimulationSettings",  # a rule that needs every reply by itself is run round by round
    ]


def test_the_cells_of_a_comparison_hold_no_data_sets(compared: tuple[Path, Runs, list[Cell]]) -> None:
    """They are kept until the page is written. On MNIST, the specs of 60 cells held 20 GB."""
    specs = [spec for cell in compared[2] for spec in cell.specs]
    assert specs and all("dataset" not in vars(spec.data) for spec in specs)
    assert without_data(specs[0]) == specs[0] and without_data(specs[0]).digest == specs[0].digest


def test_the_page_has_its_verdict_first_then_every_row_with_its_deviation(
    compared: tuple[Path, Runs, list[Cell]],
) -> None:
    out, _, cells = compared[0] / "out", compared[1], compared[2]
    lines = (out / "small.md").read_text().splitlines()
    assert lines[2] == f"**{verdict(small(), cells)}**" and "A note." in lines
    text = "\n".join(lines)
    for part in (
        "fedbilevel reproduce small --seeds 2",
        "revision",
        "| weights (bilevel) |",
        "| geometric median |",
        "±",
    ):
        assert part in text
    assert text.count("| weights (bilevel) |") == 3 and text.count("| alike |") == 2 + 1  # no auc of a control
    assert [row["row"] for row in csv.DictReader((out / "small.csv").read_text().splitlines())] == [
        "weights",
        "alike",
        "geometric median",
    ]
    records = json.loads((out / "small.json").read_text())
    assert all(len(record["test_accuracy_seeds"]) == 2 and record["rounds"] == 40 for record in records)
    assert (out / "small.png").stat().st_size > 5000
    assert "small-time.png" in text and (out / "small-time.png").stat().st_size > 5000


def test_nothing_is_run_again_and_kept_runs_serve_another_machine(
    compared: tuple[Path, Runs, list[Cell]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _, cells = compared

    def refuse(specs: Any, runs: Runs, **_: Any) -> Any:
        assert all(runs.share(spec) == 1.0 for spec in specs), "a run that is kept is done again"
        return [*specs]

    monkeypatch.setattr(comparison, "do_runs_or_alone", refuse)
    how: dict[str, Any] = dict(seeds=2, runs=Runs(tmp_path / "runs"), jobs=1, console=QUIET, kept=folder / "kept")
    again = compare(small(), out=tmp_path / "out", **how)
    assert [cell.values for cell in again] == [cell.values for cell in cells]


def test_the_verdict_names_the_columns_in_which_bilevel_is_behind_and_leaves_the_oracle_out() -> None:
    made = small()
    weights, alike, median = made.rows
    oracle = replace(median, kind="oracle")

    def cell(row: Any, value: float) -> Cell:
        return Cell(row, made.columns[0], chosen={}, values={"test_accuracy": [value - 0.01, value + 0.01]})

    ahead = verdict(made, [cell(weights, 0.8), cell(alike, 0.7), cell(oracle, 0.9)])
    assert (
        ahead
        == "Bilevel is ahead of every control in its column: half bad by 10.00 points (weights against alike)."
    )
    behind = verdict(made, [cell(weights, 0.8), cell(alike, 0.7), cell(median, 0.81)])
    assert behind == (
        "Bilevel is behind its best control in 1 of 1 columns: "
        "half bad by 1.00 points, less than a deviation (weights against geometric median)."
    )


def test_the_page_of_an_unfinished_comparison_says_what_was_not_run_and_claims_no_lead_over_it(
    compared: tuple[Path, Runs, list[Cell]], tmp_path: Path
) -> None:
    _, runs, cells = compared
    other = replace(small().rows[1], label="other", set={**small().rows[1].set, "problem.train_on": "both"})
    wider = replace(small(), rows=(*small().rows, other))
    how: dict[str, Any] = dict(seeds=2, runs=runs, jobs=1, console=QUIET, finished=True)
    found = compare(wider, out=tmp_path, **how)
    assert [cell.missing for cell in found] == [False, False, False, True]
    assert [cell.values for cell in found[:3]] == [cell.values for cell in cells]
    page = (tmp_path / "small.md").read_text()
    assert "| other | not run |" in page and "UNFINISHED: 1 of 4 cells" in page
    assert "ahead of every control" not in page


def test_a_comparison_of_which_nothing_was_run_writes_no_page_and_says_so(tmp_path: Path) -> None:
    nothing = dict(seeds=2, runs=Runs(tmp_path / "runs"), jobs=1, console=QUIET, finished=True)
    with pytest.raises(SettingsError, match="no row of it has been run to its end"):
        compare(small(), out=tmp_path / "out", **nothing)  # type: ignore[arg-type]
    assert not list((tmp_path / "out").iterdir())


def test_a_run_that_diverged_is_not_chosen() -> None:
    assert best_of([None, 0.2, 0.4, 0.4], small()) == 2
    assert best_of([None, 0.2, 0.4], replace(small(), select="valid_loss")) == 1


def test_an_application_is_refused_if_a_row_has_another_budget_or_a_name_is_wrong() -> None:
    for old, new, message in (
        ("points = 2", "points = 3", "it tries 2 points, and points = 3: every row has the same budget"),
        ('kind = "bilevel"', 'kind = "best"', "kind = 'best'"),
        ('columns = ["half bad"]', 'columns = ["bad"]', "columns = 'bad'"),
        ("note = ", "notes = ", "notes is not a setting"),
        ('"evaluate.window" = 10', '"evaluate.window" = 30', "evaluate.window = 30 is more than half"),
        ('"algorithm.beta"', '"algorithm.betta"', "application small, alike, half bad: "),
    ):
        with pytest.raises(SettingsError, match=message):
            read_application(SMALL.replace(old, new), "small")
    with pytest.raises(UnknownName, match="client-weights"):
        load_study("client-wieghts")
