"""Studies of points: a run for each value of a setting, and a figure of where they end."""

from __future__ import annotations

import json
from collections import Counter
from importlib import resources
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbilevel import SettingsError
from fedbilevel.record import summarise
from fedbilevel.report import Points, draw_points
from fedbilevel.studies import Runs, load_study, reproduce
from fedbilevel.studies.study import Study, StudyRun

SMALL = {"data.name": "digits", "data.clients": 10, "stop.rounds": 40}


def finished(runs: Runs, run: StudyRun, accuracy: float, **more: Any) -> None:
    """The folder of a run that has ended at an accuracy."""
    folder = runs.of(run.spec(0))
    folder.path.mkdir(parents=True)
    record = {
        "iteration": 8,
        "rounds": 40,
        "bytes_up": 1,
        "bytes_down": 1,
        "seconds": 1.0,
        "test_accuracy": accuracy,
    }
    folder.write_history([record])
    books: dict[str, Any] = {"steps": {}, "probes": {}, "rejected": {}}
    folder.write_json("summary.json", summarise([record], books, **more))
    folder.write_json("environment.json", {"revision": "abc"})


def written(study: Study, runs: Runs, out: Path) -> list[dict[str, Any]]:
    reproduce([study], seeds=1, out=out, runs=runs, jobs=1, console=Console(quiet=True))
    assert (out / f"{study.name}.png").read_bytes().startswith(b"\x89PNG")
    return json.loads((out / f"{study.name}.json").read_text())


def test_a_study_of_points_writes_what_each_run_reached_at_its_setting(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    robust = {**SMALL, "federation.aggregator": "median", "algorithm.participation": 3}
    made = tuple(StudyRun("median", 0, {**robust, "attack.share": at}, {}, at) for at in (0.0, 0.3))
    for run, accuracy in zip(made, (0.9, 0.4), strict=True):
        finished(runs, run, accuracy)
    rows = written(Study("small", "Small", "points", made, ("one",), x="share of attackers"), runs, tmp_path)
    assert [(row["run"], row["at"], row["accuracy"]) for row in rows] == [
        ("median", 0.0, 0.9),
        ("median", 0.3, 0.4),
    ]
    page = (tmp_path / "report.html").read_text()
    assert "median at 0.3: test accuracy 40.0%." in page


def test_on_an_axis_of_epsilon_a_run_stands_where_its_summary_says(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    private = StudyRun("central", 0, {**SMALL, "privacy.mode": "central"}, {}, 10.0)
    plain = StudyRun("without privacy", 0, SMALL, {})
    finished(runs, private, 0.7, privacy={"epsilon": 2.5})
    finished(runs, plain, 0.8)
    rows = written(Study("eps", "Eps", "points", (private, plain), ("one",), x="epsilon"), runs, tmp_path)
    assert [(row["at"], row["accuracy"]) for row in rows] == [(2.5, 0.7), (None, 0.8)]


def test_the_robust_study_has_every_rule_at_every_share_on_both_partitions() -> None:
    study = load_study("robust")
    specs = [run.spec(0) for run in study.runs]
    cases = Counter((s.federation.aggregator, s.attack.share, s.data.partition) for s in specs)
    assert len(cases) == len(specs) == 6 * 4 * 2
    assert {share for _, share, _ in cases} == {0.0, 0.1, 0.2, 0.3}
    assert all(run.at == spec.attack.share for run, spec in zip(study.runs, specs, strict=True))
    assert len({spec.digest for spec in specs}) == len(specs)


def test_the_study_of_attacks_has_every_attack_on_every_rule_on_both_partitions() -> None:
    study = load_study("attacks")
    specs = [run.spec(0) for run in study.runs]
    cases = Counter((s.federation.aggregator, s.attack.kind, s.data.partition) for s in specs)
    assert len(cases) == len(specs) == 6 * 6 * 2
    assert [run.at for run in study.runs] == [s.attack.kind or "none" for s in specs]
    assert {(run.panel, s.data.partition) for run, s in zip(study.runs, specs, strict=True)} == {
        (0, "iid"),
        (1, "dirichlet"),
    }


@pytest.mark.parametrize(
    ("x", "low", "high"), [("share of attackers", 0.1, 0.3), ("epsilon", 0.1, 0.3), ("attack", "alie", "scaled")]
)
def test_the_figure_takes_lines_and_levels_in_several_panels(x: str, low: Any, high: Any, tmp_path: Path) -> None:
    lines = [
        Points("a", 0, [(low, 0.5), (high, 0.2)]),
        Points("b", 1, [(high, 0.4), (low, 0.9)]),
        Points("level", 1, [(None, 0.8)]),
    ]
    draw_points(lines, ["one", "two"], "Title", x, [tmp_path / "a.png", tmp_path / "a.svg"])
    drawn = (tmp_path / "a.svg").read_text()
    assert (tmp_path / "a.png").stat().st_size > 5000 and "<svg" in drawn
    assert x != "attack" or (f"<!-- {low} -->" in drawn and f"<!-- {high} -->" in drawn)


def course(spec: Any) -> list[dict[str, Any]]:
    """A history whose test accuracy is 0.5 and then 0.7, and whose training accuracy is 0.95 in the end."""
    common = {"bytes_up": 1, "bytes_down": 1, "seconds": 1.0}
    return [
        {"iteration": i, "rounds": 5 * i, "test_accuracy": 0.5 if i < 6 else 0.7, "train_accuracy": 0.95} | common
        for i in range(1, 9)
    ]


def test_a_line_shows_the_accuracy_that_its_run_names_over_the_window_of_its_spec(tmp_path: Path) -> None:
    runs = Runs(tmp_path / "runs")
    settings = {**SMALL, "evaluate.train": True, "evaluate.window": 25}
    made = tuple(StudyRun("AggITD", 0, settings, {}, y=y) for y in ("test_accuracy", "train_accuracy"))
    finished(runs, made[0], 0.7)
    runs.of(made[0].spec(0)).write_history(course(made[0].spec(0)))
    rows = written(Study("both", "Both", "curves", made, ("one",)), runs, tmp_path)
    assert [(row["rows"], row["final"], row["swing"]) for row in rows] == [
        ("test", 0.62, 0.098),
        ("training", 0.95, 0.0),
    ]
    assert [row["rounds_to_90"] for row in rows] == [None, 5.0]
    assert "over the last 25 rounds" in (tmp_path / "both.md").read_text()
    assert "on training rows" in (tmp_path / "both.svg").read_text().replace("<!-- ", "")


@pytest.fixture
def studies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder whose TOML files are the studies that come with the library."""
    folder = tmp_path / "specs"
    folder.mkdir()
    monkeypatch.setattr(resources, "files", lambda name: tmp_path if name == "fedbilevel.studies" else files(name))
    return folder


HEAD = 'title = "T"\nkind = "curves"\npanels = ["one"]\n'


@pytest.mark.parametrize(
    ("y", "message"),
    [("accuracy", "y = 'accuracy' is unknown"), ("train_accuracy", "needs evaluate.train = true")],
)
def test_an_accuracy_that_a_study_cannot_show_is_refused_before_its_runs(
    studies: Path, y: str, message: str
) -> None:
    (studies / "mine.toml").write_text(f'{HEAD}[[runs]]\nlabel = "a"\npanel = 0\ny = "{y}"\nset = {{}}\n')
    with pytest.raises(SettingsError, match=message):
        load_study("mine")


def test_a_run_that_shows_both_accuracies_is_two_lines_of_one_run(studies: Path) -> None:
    run = '[[runs]]\nlabel = "a"\npanel = 0\nset = {"evaluate.train" = true}\npaper = {readings = [[1, 0.5]]}\n'
    (studies / "mine.toml").write_text(f'{HEAD}y = ["train_accuracy", "test_accuracy"]\n{run}')
    first, second = load_study("mine").runs
    assert (first.y, second.y) == ("train_accuracy", "test_accuracy")
    assert first.spec(0).digest == second.spec(0).digest and first.paper and not second.paper
