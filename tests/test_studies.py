"""Studies: every TOML loads, runs are shared and resumed, tables and report say what was measured."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedbilevel import TrimmedMean, load_spec
from fedbilevel.errors import FedBilevelError, SettingsError, UnknownName
from fedbilevel.spec import Spec
from fedbilevel.studies import Runs, Workers, load_study, reproduce, run_all, runner, study_names, tune
from fedbilevel.studies.kept import _packed, keep, take
from fedbilevel.studies.study import Study, StudyRun
from fedbilevel.studies.tune import parse_axis

SMALL = {
    "data.name": "digits",
    "data.clients": 10,
    "problem.hidden": 8,
    "algorithm.participation": 0.5,
    "algorithm.lower_epochs": 1,
    "stop.rounds": 40,
}
QUIET = Console(quiet=True)


def small_study(kind: str = "curves") -> Study:
    runs = tuple(
        StudyRun(name, panel, {**SMALL, "algorithm.name": algorithm}, {"readings": [[40.0, 0.5]]})
        for panel, (name, algorithm) in enumerate((("AggITD", "fbo-aggitd"), ("FedNest", "fednest")))
    )
    return Study("small", "A small study", kind, runs, ("one", "two"))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def reproduced(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Runs]:
    """A small study with two seeds, really run in processes of its own."""
    folder = tmp_path_factory.mktemp("reproduced")
    runs = Runs(folder / "runs")
    reproduce([small_study()], seeds=2, out=folder / "out", runs=runs, jobs=2, console=QUIET)
    return folder / "out", runs


def test_there_is_a_study_for_every_table_and_figure_of_the_paper_and_seven_of_ours() -> None:
    assert study_names() == [
        "attacks",
        "cifar-fednest",
        "figure1",
        "figure1-exchanges",
        *(f"figure{i}" for i in range(2, 8)),
        "grid",
        "privacy",
        "readings",
        "robust",
        "smoothing",
        "table1",
        "table2",
    ]


@pytest.mark.parametrize("name", study_names())
def test_every_spec_of_a_study_is_valid_and_its_panels_exist(name: str) -> None:
    study = load_study(name)
    for run in study.runs:
        assert isinstance(run.spec(0), Spec)
        assert run.panel < max(1, len(study.panels))


def test_table_2_has_the_settings_and_values_of_the_paper() -> None:
    study = load_study("table2")
    assert len(study.runs) == 12
    by_label = {run.label: run for run in study.runs}
    assert by_label["FBO-AggITD, non-i.i.d., tau 5"].paper == {"rounds_to_90": 305, "final": 0.9388}
    for run in study.runs:
        spec = run.spec(0)
        algorithm: Any = spec.algorithm
        assert (spec.stop.rounds, spec.data.clients, algorithm.participation) == (4000, 100, 0.1)
        assert (algorithm.N, algorithm.alpha, algorithm.beta) == (1, 0.01, 0.003)
        assert spec.federation.cohort == "phase"
        released = getattr(algorithm, "mode", None) == "released_code"
        problem: Any = spec.problem
        assert (problem.dropout, problem.smoothing) == ((0.5, 0.0) if released else (0.0, 0.001))
        assert released is run.label.startswith("FedNest as released")


def test_figures_share_the_runs_of_the_table() -> None:
    table = {run.spec(0).digest for run in load_study("table2").runs}
    figure = {run.spec(0).digest for run in load_study("figure2").runs}
    assert figure <= table


def test_an_unknown_study_is_named() -> None:
    with pytest.raises(UnknownName, match="table9"):
        load_study("table9")


@pytest.mark.slow
def test_a_short_study_says_so_everywhere(tmp_path: Path, reproduced: tuple[Path, Runs]) -> None:
    _, runs = reproduced
    study = small_study().shortened(0.5)
    reproduce([study], seeds=2, out=tmp_path, runs=runs, jobs=1, console=QUIET)
    assert "SHORT: 50%" in (tmp_path / "small.md").read_text()
    assert "SHORT" in (tmp_path / "report.html").read_text()
    rows = json.loads((tmp_path / "small.json").read_text())
    assert all(row["final"] is not None for row in rows)


@pytest.mark.slow
def test_the_study_writes_its_table_in_three_forms_and_its_figure_in_two(reproduced: tuple[Path, Runs]) -> None:
    out, _ = reproduced
    rows = json.loads((out / "small.json").read_text())
    assert [row["run"] for row in rows] == ["AggITD", "FedNest"]
    with (out / "small.csv").open() as stream:
        assert [row["run"] for row in csv.DictReader(stream)] == ["AggITD", "FedNest"]
    assert "| AggITD |" in (out / "small.md").read_text()
    assert (out / "small.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (out / "small.svg").read_text()


@pytest.mark.slow
def test_the_report_is_self_contained_and_its_pictures_have_a_text(reproduced: tuple[Path, Runs]) -> None:
    page = (reproduced[0] / "report.html").read_text()
    assert not re.search(r'(src|href)="(?!data:|#)', page)
    assert "<script" not in page
    images = re.findall(r"<img [^>]*>", page)
    assert images and all(re.search(r'alt="[^"]{20,}"', image) for image in images)
    for part in ("fedbilevel reproduce small --seeds 2", "revision", "lower_steps", "read off its figures"):
        assert part in page


@pytest.mark.slow
def test_finished_runs_are_not_run_again(reproduced: tuple[Path, Runs]) -> None:
    _, runs = reproduced
    spec = small_study().runs[0].spec(0)
    before = runs.of(spec).file("history.jsonl").stat().st_mtime_ns
    assert runs.share(spec) == 1.0
    run_all([spec], runs, jobs=1, console=QUIET)
    assert runs.of(spec).file("history.jsonl").stat().st_mtime_ns == before


@pytest.mark.slow
def test_a_longer_budget_goes_on_with_the_shorter_run_and_serves_it_still_and_a_log_tells_its_progress(
    reproduced: tuple[Path, Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, runs = reproduced
    monkeypatch.setattr(runner, "EVERY", 0.0)
    monkeypatch.setattr(runner, "LOOK", 0.2)
    log = io.StringIO()
    longer = load_spec("paper", {**SMALL, "algorithm.name": "fbo-aggitd", "seed": 0, "stop.rounds": 60})
    shorter = small_study().runs[0].spec(0)
    first = runs.history(shorter)
    assert 0 < runs.share(longer) < 1
    run_all([longer, shorter], runs, jobs=1, console=Console(file=log))
    assert runs.share(longer) == 1.0
    assert re.search(r"^\d\.\d of 1 runs, left (\?|\d:\d\d:\d\d)$", log.getvalue(), re.MULTILINE)
    without_seconds = [
        [{k: v for k, v in r.items() if k != "seconds"} for r in h] for h in (first, runs.history(shorter))
    ]
    assert without_seconds[0] == without_seconds[1]
    assert runs.history(longer)[-1]["rounds"] == 60


@pytest.mark.slow
def test_a_run_that_ends_its_process_is_told_and_the_next_ones_get_another_which_stays_for_later_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "deadly.py").write_text("import os\n\n\ndef make():\n    os._exit(3)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.syspath_prepend(tmp_path)
    deadly = load_spec("paper", {"problem.name": "python", "problem.function": "deadly:make"})
    good, later = (
        load_spec("paper", {"problem.name": "quadratic", "data.clients": 4, "stop.rounds": 10, "seed": seed})
        for seed in (0, 1)
    )
    runs, started = Runs(tmp_path / "runs"), list[Any]()
    popen = subprocess.Popen

    def start(*arguments: Any, **options: Any) -> Any:
        started.append(popen(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(subprocess, "Popen", start)
    with Workers(runs, 1) as workers:
        with pytest.raises(FedBilevelError, match=r"^1 of 2 runs failed; first: .*: its process was killed$"):
            run_all([deadly, good], runs, jobs=1, console=QUIET, workers=workers)
        assert runs.share(good) == 1.0 and len(started) == 2
        run_all([later], runs, jobs=1, console=QUIET, workers=workers)
        assert runs.share(later) == 1.0 and len(started) == 2 and started[1].poll() is None
    assert started[1].poll() is not None


@pytest.mark.slow
def test_a_run_that_diverges_keeps_what_it_reached_and_is_named_in_the_table(tmp_path: Path) -> None:
    """Its summary has the reason, it is not run again, and the other runs are not held up by it."""
    study = small_study()
    wild = replace(study.runs[0], overrides={**study.runs[0].overrides, "algorithm.lam": 1e38})
    runs = Runs(tmp_path / "runs")
    sections = reproduce(
        [replace(study, runs=(wild, study.runs[1]))], seeds=1, out=tmp_path, runs=runs, jobs=1, console=QUIET
    )
    failure = runs.failure(wild.spec(0))
    assert failure is not None and "beyond 1e+15" in failure
    assert runs.share(wild.spec(0)) == 1.0
    assert sections[0].rows[0]["remark"].startswith("diverged after")
    assert "remark" not in sections[0].rows[1]


@pytest.mark.slow
def test_table_1_is_what_the_ledger_measured(tmp_path: Path) -> None:
    study = load_study("table1")
    study = dataclasses.replace(study, runs=study.runs[1::3])  # one row for each method
    sections = reproduce([study], seeds=1, out=tmp_path, runs=Runs(tmp_path / "runs"), jobs=1, console=QUIET)
    p, q = 10, 8
    for row in sections[0].rows:
        N, T, naive = row["N"], row["T"] or 0, row["algorithm"] == "naive ITD"
        assert row["rounds_per_iteration"] == (3 * N + 2 if naive else 2 * N + 3 + T)
        assert row["paper"] == (None if naive else row["rounds_per_iteration"])
        assert row["loops"] == row["paper_loops"] == (1 if row["algorithm"] == "FBO-AggITD" else 2)
        # Every draw has one row: N for q, N for the lower steps, those of the hypergradient, one upper step.
        assert row["gradient_samples"] == 2 * N + (2 if naive else 3)
        if naive:
            assert row["product_samples"] == 2 * N - 1
            assert (row["bytes_up"], row["bytes_down"]) == (
                4 * (N + 2) * p + 12 * N * q,
                8 * p + 4 * (4 * N + 1) * q,
            )
        elif T:
            assert row["product_samples"] == T + 1
            assert row["bytes_up"] == 4 * (2 * p + (2 * N + T + 1) * q)
        else:  # N - Q products and the mixed derivative, and as many vectors z as N - Q + 1
            length = row["product_samples"] - 1
            assert 0 < length < N
            assert row["bytes_up"] == pytest.approx(4 * (2 * p + (2 * N + length + 1) * q))


@pytest.mark.slow
def test_tune_runs_the_grid_and_writes_the_best_as_a_spec(tmp_path: Path) -> None:
    sets = [f"{key}={value}" for key, value in SMALL.items()]
    grid = ["algorithm.beta,algorithm.alpha=0.003,0.01;0.05,0.2"]
    rows = tune(None, sets, grid, seeds=1, out=tmp_path, jobs=1, console=QUIET)
    assert [row["final"] for row in rows] == sorted((row["final"] for row in rows), reverse=True)
    best: Any = load_spec(tmp_path / "best.toml").algorithm
    assert (best.beta, best.alpha) == (rows[0]["algorithm.beta"], rows[0]["algorithm.alpha"])


def test_grid_axes_may_move_together() -> None:
    assert parse_axis("a.b=1;2") == [{"a.b": 1}, {"a.b": 2}]
    assert parse_axis("a.b,a.c=1,x;2,y") == [{"a.b": 1, "a.c": "x"}, {"a.b": 2, "a.c": "y"}]
    for wrong in ("a.b", "a.b,a.c=1;2", "=1"):
        with pytest.raises(SettingsError):
            parse_axis(wrong)


@pytest.mark.parametrize("name", ["attacks", "robust"])
def test_the_trimmed_mean_of_a_study_cuts_what_its_table_says(name: str) -> None:
    rules = {run.label: run.spec(0).federation.aggregator for run in load_study(name).runs}
    assert rules["trimmed mean"] == TrimmedMean(share=0.3)
    assert len(set(map(type, rules.values()))) == len(rules) == 6


def test_kept_runs_give_the_same_table_without_a_run_and_a_damaged_or_foreign_one_is_refused(
    tmp_path: Path, reproduced: tuple[Path, Runs], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, runs = reproduced
    study, kept = small_study(), tmp_path / "kept"
    monkeypatch.setattr(runner, "_Worker", None)  # nothing can be run
    reproduce([study], seeds=2, out=tmp_path / "a", runs=runs, jobs=1, console=QUIET, kept=kept)
    files = {path.name: path.read_bytes() for path in sorted(kept.iterdir())}
    assert len(files) == 4 and all(name.endswith(".tar.xz") for name in files)

    def again(place: str, seeds: int = 2) -> None:
        elsewhere = Runs(tmp_path / place)
        reproduce([study], seeds=seeds, out=tmp_path / "b", runs=elsewhere, jobs=1, console=QUIET, kept=kept)

    again("empty")
    assert (tmp_path / "b" / "small.json").read_text() == (out / "small.json").read_text()
    assert {path.name: path.read_bytes() for path in sorted(kept.iterdir())} == files
    first, second = (kept / f"{run.spec(0).digest}.tar.xz" for run in study.runs)
    hollow = tmp_path / "hollow"
    take(Runs(hollow), [study.runs[0].spec(0)], kept)
    folder = Runs(hollow).of(study.runs[0].spec(0))
    folder.write("history.jsonl", '{"iteration": "none"}\n')
    wrong = {"another spec": second.read_bytes(), "not a kept run": files[first.name][:200]}
    for message, content in (wrong | {"history.jsonl": _packed(folder)}).items():
        first.write_bytes(content)
        with pytest.raises(FedBilevelError, match=message):
            again(message)
        assert not Runs(tmp_path / message).of(study.runs[0].spec(0)).path.exists()


def test_a_shorter_run_does_not_replace_a_longer_one_that_is_kept(
    tmp_path: Path, reproduced: tuple[Path, Runs]
) -> None:
    _, runs = reproduced
    spec, kept = small_study().runs[0].spec(0), tmp_path / "kept"
    keep(runs, [spec], kept)
    (file,) = kept.iterdir()
    content = file.read_bytes()
    short = Runs(tmp_path / "short")
    take(short, [spec], kept)
    folder, fewer = short.of(spec), replace(spec, stop=replace(spec.stop, rounds=20))
    folder.write_history([r for r in folder.history() if r["rounds"] <= 20])
    keep(short, [fewer], kept)
    assert file.read_bytes() == content
    file.unlink()
    keep(short, [fewer], kept)
    assert len(file.read_bytes()) < len(content)
    keep(runs, [spec], kept)
    assert file.read_bytes() == content, "the longer one replaces it, with the same bytes as before"
