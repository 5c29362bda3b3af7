"""`tune` beside its grid: many runs in one program, successive halving, and Optuna's samplers."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel.spec import StopSettings, load_spec
from fedbilevel.studies import Runs, tune

SETS = [
    *("problem.name=quadratic", "data.clients=4", "algorithm.participation=2", "algorithm.lam=0.3"),
    *("stop.rounds=45", "evaluate.every=2", "federation.engine=fused"),
    *("algorithm.lower_steps=1", "algorithm.upper_steps=1"),
]
BETAS = "algorithm.beta=0.001;0.01;0.2"


def tuned(out: Path, axis: str = BETAS, **options: Any) -> list[dict[str, Any]]:
    console = Console(quiet=True)
    return tune("paper", SETS, [axis], seeds=1, out=out, jobs=1, console=console, metric="lower_gap", **options)


@pytest.fixture
def in_one_program(monkeypatch: pytest.MonkeyPatch) -> list[list[Any]]:
    """For each call, the budgets of the runs that are done together. No run is done in another process."""
    calls: list[list[Any]] = []
    run_many = tune.__globals__["run_many"]

    def noted(specs: Any, folders: Any, **options: Any) -> Any:
        calls.append([(spec.algorithm.beta, spec.stop.rounds) for spec in specs])
        return run_many(specs, folders, **options)

    monkeypatch.setitem(tune.__globals__, "run_many", noted)
    return calls


def lines(history: Any) -> list[dict[str, Any]]:
    return [{k: v for k, v in line.items() if k != "seconds" and v is not None} for line in history]


@pytest.mark.slow
def test_halving_goes_on_with_the_best_third_and_begins_no_run_again(
    tmp_path: Path, in_one_program: list[list[Any]]
) -> None:
    """The same command again does nothing, and the best run has the history of an unbroken one."""
    rows = tuned(tmp_path, search="halving")
    assert in_one_program == [[(0.001, 15), (0.01, 15), (0.2, 15)], [(0.2, 45)]]
    assert [(row["algorithm.beta"], row["rounds"]) for row in rows] == [(0.2, 45), (0.01, 15), (0.001, 15)]
    assert tuned(tmp_path, search="halving") == rows
    assert len(in_one_program) == 2
    best = load_spec(tmp_path / "best.toml")
    assert best.stop.rounds == 45
    single = fb.run(best, tmp_path / "alone").history
    for line, same in zip(lines(Runs(tmp_path / "runs").history(best)), lines(single), strict=True):
        assert line == pytest.approx(same, rel=1e-4, abs=1e-5)


def test_halving_compares_by_rounds_and_needs_a_budget_of_them() -> None:
    spec, rungs = load_spec("paper", {"stop.rounds": 100}), tune.__globals__["_rungs"]
    assert rungs(spec, 2) == [100]
    assert rungs(spec, 9) == [11, 33, 100]
    with pytest.raises(fb.SettingsError, match=r"stop\.rounds is missing: --search halving"):
        rungs(dataclasses.replace(spec, stop=StopSettings(iterations=5)), 9)


@pytest.mark.parametrize("sampler", ["tpe", "random", "cmaes"])
def test_a_sampler_of_optuna_draws_from_ranges_in_batches(
    sampler: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The runs are replaced by a formula, so only the search is tested: it comes close to the best point."""
    pytest.importorskip("optuna")
    pytest.importorskip("cmaes")
    batches: list[int] = []

    def scored(specs: Any, runs: Any, **_: Any) -> None:
        batches.append(len(specs))
        for spec in specs:
            runs.of(spec).path.mkdir(parents=True, exist_ok=True)
            gap = abs(spec.algorithm.beta - 0.1)
            line = dict(
                iteration=9, rounds=45, bytes_up=0, bytes_down=0, seconds=0.0, test_accuracy=None, lower_gap=gap
            )
            (runs.of(spec).path / "history.jsonl").write_text(json.dumps(line) + "\n")

    monkeypatch.setitem(tune.__globals__, "do_runs", scored)
    rows = tuned(tmp_path, "algorithm.beta=0.001..1.0", search="optuna", sampler=sampler, trials=20)
    assert batches == [8, 8, 4]
    assert len(rows) == 20
    assert all(0.001 <= row["algorithm.beta"] <= 1.0 for row in rows)
    assert rows[0]["lower_gap"] == min(row["lower_gap"] for row in rows) < 0.1


def test_the_extra_of_optuna_is_named_if_it_is_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(fb.SettingsError, match=r"--search optuna needs the extra fedbilevel\[optuna\]"):
        tuned(tmp_path / "out", search="optuna")
    assert not (tmp_path / "out").exists()
