"""Metrics of one's own and figures of iterations: in the history, the summary, `stop`, the curve and `tune`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from rich.console import Console

import fedbilevel as fb
from fedbilevel import AggITD, Progress, SettingsError, UnknownName, load_spec
from fedbilevel.algorithms import FedNest, Gossip, LFedNest
from fedbilevel.federation import Federation
from fedbilevel.problems import QuadraticTask
from fedbilevel.record import direction, in_window, metric_names, summarise
from fedbilevel.report import draw_curve, metrics_table
from fedbilevel.run._rehearsal import rehearsed_rounds
from fedbilevel.studies import runner, tune

ALPHA = 0.1
METHODS: dict[str, Any] = {
    "fbo-aggitd": AggITD(N=2, participation=1.0, alpha=ALPHA, beta=0.1, lam=0.3, lower_steps=1),
    "fednest": FedNest(N=2, T=3, participation=1.0, alpha=ALPHA, beta=0.1, lam=0.3, lower_steps=1),
    "fednest, early": FedNest(N=1, T=6, participation=3, alpha=ALPHA, beta=0.1, lower_steps=1, stop_early=True),
    "lfednest": LFedNest(N=2, T=2, participation=1.0, alpha=ALPHA, beta=0.1, lower_steps=1),
    "gossip": Gossip(alpha=ALPHA, gamma=0.1, L_g=1.0),
    "ma-dsbo": fb.MADSBO(alpha=ALPHA, beta=0.1, gamma=0.5, T=2),
}


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    return fb.Quadratic(size_x=4, size_y=3).make(4, 0)


def trained(task: QuadraticTask, algorithm: Any, *, measure: Any = None, **options: Any) -> fb.Result:
    return fb.train(task.problem, task.clients, algorithm, measure=measure or task.measure, **options)


class Falling:
    """A measure that gives the next of its values at every evaluation."""

    def __init__(self, *values: float, name: str = "auc") -> None:
        self.values, self.name, self.calls = values, name, 0

    def __call__(self, x: Any, y: Any) -> dict[str, float]:
        self.calls += 1
        return {self.name: self.values[min(self.calls, len(self.values)) - 1]}


# The figures of an iteration ---------------------------------------------------------------------------


def test_the_figures_of_an_iteration_are_those_of_the_closed_form(task: QuadraticTask) -> None:
    algorithm = AggITD(N=1, participation=1.0, alpha=ALPHA, beta=0.1, lam=0.3, lower_steps=1, upper_steps=1)
    start, record = trained(task, algorithm, stop={"iterations": 1}).history
    residual = task.b.astype(np.float64).mean((0, 1))  # A y + B x + b at x = 0 and y = 0
    assert record["lower_residual"] == pytest.approx(np.linalg.norm(residual), rel=1e-5)
    assert record["update_y"] == pytest.approx(0.1 * np.linalg.norm(residual), rel=1e-5)
    assert record["update_x"] == pytest.approx(ALPHA * record["hypergradient_estimate"], rel=1e-5)
    assert not start.keys() & {"update_x", "update_y", "lower_residual", "hypergradient_estimate"}


def test_the_estimate_is_the_hypergradient_where_the_series_is_long(task: QuadraticTask) -> None:
    algorithm = AggITD(N=300, participation=1.0, alpha=1e-6, beta=0.3, lam=0.9, lower_steps=1, estimator="summed")
    record = trained(task, algorithm, stop={"iterations": 1}).history[-1]
    assert record["hypergradient_estimate"] == pytest.approx(record["hypergradient_norm"], rel=1e-3)


@pytest.mark.parametrize("name", ["gossip", "ma-dsbo", "lfednest", "fednest"])
def test_a_method_reports_what_it_computes(task: QuadraticTask, name: str) -> None:
    record = trained(task, METHODS[name], stop={"iterations": 1}).history[-1]
    assert record["lower_residual"] > 0 and record["update_y"] > 0
    assert ("hypergradient_estimate" in record) == (name != "lfednest")
    if name == "gossip":  # its first gradients are at zero
        assert record["lower_residual"] == pytest.approx(np.linalg.norm(task.b.mean((0, 1))), rel=1e-5)


def test_an_observer_sees_the_parameters_as_pytrees(task: QuadraticTask) -> None:
    seen: list[Progress] = []
    result = trained(task, METHODS["fbo-aggitd"], stop={"iterations": 2}, observers=[seen.append])
    assert seen[0].x.shape == task.problem.x.shape
    np.testing.assert_array_equal(seen[-1].x, result.x)
    np.testing.assert_array_equal(seen[-1].y, result.y)
    assert np.linalg.norm(seen[0].x - seen[1].x) == pytest.approx(result.history[-1]["update_x"], rel=1e-5)
    told = Progress.from_mapping(json.loads(json.dumps(seen[0].to_mapping())))
    assert told == seen[0]
    with pytest.raises(SettingsError, match=r"progress\.x and progress\.y are not known here"):
        _ = told.x


# Stopping ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stop", "values", "name", "iterations"),
    [
        ({"at": 0.9}, (0.1, 0.5, 0.95, 0.99), "auc", 2),
        ({"at": 0.5}, (0.9, 0.7, 0.5, 0.4), "my_loss", 2),
        ({"at": 0.5, "mode": "max"}, (0.4, 0.45, 0.5, 0.6), "my_loss", 2),
        ({"patience": 2}, (0.1, 0.5, 0.5, 0.4, 0.9), "auc", 3),
        ({"patience": 2}, (0.5, 0.4, float("nan"), 0.45, 0.1), "my_loss", 3),
        ({"patience": 2, "at": 0.45}, (0.1, 0.5, 0.2), "auc", 1),
    ],
)
def test_a_run_stops_by_any_metric(
    task: QuadraticTask, stop: dict[str, Any], values: tuple[float, ...], name: str, iterations: int
) -> None:
    stop = stop | {"metric": name, "iterations": 6}
    # The metric is measured once more before the run, to know its name.
    result = trained(task, METHODS["fbo-aggitd"], stop=stop, measure=Falling(values[0], *values, name=name))
    assert result.summary["iterations"] == iterations


def test_patience_is_kept_by_a_run_that_is_resumed(task: QuadraticTask, tmp_path: Path) -> None:
    stop = {"metric": "auc", "patience": 4}
    options: dict[str, Any] = {"out": tmp_path / "run", "evaluate": {"checkpoint_every": 1}}
    trained(
        task, METHODS["fbo-aggitd"], stop=stop | {"iterations": 3}, measure=lambda x, y: {"auc": 0.5}, **options
    )
    result = trained(
        task, METHODS["fbo-aggitd"], stop=stop, measure=lambda x, y: {"auc": 0.5}, resume=True, **options
    )
    assert result.summary["iterations"] == 4


@pytest.mark.parametrize(
    ("stop", "message"),
    [
        ({"metric": "auc"}, r"stop\.metric = 'auc' is wrong: it has no limit; set stop\.at or stop\.patience"),
        ({"rounds": 5, "at": 0.5}, r"stop\.at = 0\.5 is wrong: stop\.metric is missing"),
        ({"metric": "auc", "at": float("nan")}, r"stop\.at = nan is wrong"),
        ({"metric": "auc", "at": 1.0, "mode": "up"}, r"stop\.mode = 'up' is wrong"),
        ({"metric": "auc", "at": 1.0}, r"stop\.metric = 'auc' is unknown; use one of: .*lower_gap.*update_x"),
    ],
)
def test_a_wrong_rule_is_refused_before_the_folder_is_made(
    task: QuadraticTask, tmp_path: Path, stop: dict[str, Any], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        trained(task, METHODS["fbo-aggitd"], stop=stop, out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_figure_that_the_method_does_not_have_ends_the_run_at_its_first_evaluation(task: QuadraticTask) -> None:
    with pytest.raises(SettingsError, match=r"stop\.metric = 'hypergradient_estimate' is wrong: this method"):
        trained(task, METHODS["lfednest"], stop={"metric": "hypergradient_estimate", "at": 1e-9})


# The limit on rounds -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_an_iteration_is_counted_before_it_is_begun(task: QuadraticTask, name: str) -> None:
    algorithm = METHODS[name]
    fed = Federation(fb.Simulation(task.problem, task.clients), seed=3)
    state = algorithm.init(task.problem, 4)
    for _ in range(4):
        before, books = fed.ledger.rounds, fed.ledger.to_mapping()
        counted = rehearsed_rounds(algorithm, fed, state)
        assert fed.ledger.to_mapping() == books
        state = algorithm.step(fed, state)
        assert counted == fed.ledger.rounds - before > 0


@pytest.mark.parametrize(("limit", "iterations"), [(6, 0), (7, 1), (13, 1), (14, 2)])
def test_the_first_iteration_is_not_begun_if_it_would_exceed_the_limit(
    task: QuadraticTask, limit: int, iterations: int
) -> None:
    summary = trained(task, METHODS["fbo-aggitd"], stop={"rounds": limit}).summary
    assert (summary["iterations"], summary["rounds"]) == (iterations, 7 * iterations)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.slow
def test_a_method_of_random_cost_uses_its_rounds_and_never_exceeds_them(task: QuadraticTask, seed: int) -> None:
    for limit in (11, 23, 40):
        summary = trained(task, METHODS["fednest, early"], stop={"rounds": limit}, seed=seed).summary
        assert limit - 10 < summary["rounds"] <= limit  # an iteration takes 5 to 10 rounds


class Stubborn:
    """A method that cannot bear zeros, so that its rounds cannot be counted beforehand."""

    needs_server: ClassVar[bool] = True
    inner = METHODS["fbo-aggitd"]

    def init(self, problem: Any, clients: int) -> Any:
        return self.inner.init(problem, clients)

    def step(self, fed: Federation, s: Any) -> Any:
        after = self.inner.step(fed, s)
        if not np.any(after.y):
            raise ZeroDivisionError
        return after


def test_a_method_whose_rounds_cannot_be_counted_is_begun(task: QuadraticTask) -> None:
    summary = trained(task, Stubborn(), stop={"rounds": 20}).summary
    assert (summary["iterations"], summary["rounds"]) == (2, 14)


# Histories with other keys and without values ----------------------------------------------------------


def test_a_resumed_run_may_have_renamed_its_metric_and_measure_nan(task: QuadraticTask, tmp_path: Path) -> None:
    options: dict[str, Any] = {"out": tmp_path / "run", "evaluate": {"checkpoint_every": 1}}
    algorithm = METHODS["fbo-aggitd"]
    first = Falling(0.1, float("nan"), name="hypergradient_norm")
    trained(task, algorithm, stop={"iterations": 2}, measure=first, **options)
    renamed = lambda x, y: {"auc": float("nan"), "test_accuracy": 0.5}  # noqa: E731
    result = trained(task, algorithm, stop={"iterations": 4}, measure=renamed, resume=True, **options)
    assert [r.get("hypergradient_norm") for r in result.history] == [0.1, None, None, None, None]
    assert result.summary["accuracy"]["mean"] == 0.5
    assert result.summary["metrics"]["hypergradient_norm"]["last"] == 0.1
    assert "auc" not in result.summary["metrics"]
    for metric in (None, "hypergradient_norm", "auc", "update_x"):
        draw_curve(result.history, tmp_path / "curve.png", "title", metric)


def test_the_summary_and_its_table_have_every_metric() -> None:
    books: dict[str, Any] = {"steps": {}, "probes": {}, "rejected": {}}
    common: dict[str, Any] = {"bytes_up": 0, "bytes_down": 0, "seconds": 0.0, "test_accuracy": None}
    history = [
        {"iteration": i, "rounds": i, "auc": a, "my_loss": 1 - a} | common for i, a in enumerate((0.5, 0.75))
    ]
    assert metric_names(history) == ["auc", "my_loss"]
    made = summarise(history, books, window=2)
    assert made["metrics"]["auc"] == {"last": 0.75, "best": 0.75, "mean": 0.625, "std": 0.125, "window": 2}
    assert made["metrics"]["my_loss"]["best"] == 0.25
    table = metrics_table(made)
    assert list(table.columns[0].cells) == ["auc", "my_loss"] and list(table.columns[3].cells) == [
        "0.625",
        "0.375",
    ]


@pytest.mark.parametrize(
    ("metric", "mode"),
    [("auc", "max"), ("test_accuracy", "max"), ("my_loss", "min"), ("hypergradient_norm", "min")],
)
def test_smaller_losses_are_better_and_larger_scores(metric: str, mode: str) -> None:
    assert direction(metric) == mode


def test_the_metric_of_the_curve_is_checked_and_no_part_of_the_digest(tmp_path: Path) -> None:
    sets = {"problem.name": "quadratic", "data.clients": 4, "algorithm.participation": 2, "stop.rounds": 5}
    plain, own = (load_spec("paper", sets | more) for more in ({}, {"evaluate.metric": "lower_gap"}))
    assert own.digest == plain.digest
    fb.run(own, tmp_path / "run")
    assert (tmp_path / "run" / "curve.png").exists()
    wrong = load_spec("paper", sets | {"evaluate.metric": "auc"})
    with pytest.raises(UnknownName, match=r"evaluate\.metric = 'auc' is unknown"):
        fb.run(wrong, tmp_path / "other")
    assert not (tmp_path / "other").exists()


# Tuning ------------------------------------------------------------------------------------------------


@pytest.fixture
def in_this_process(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Runs of a grid are done in this process; the list has their specs."""
    begun: list[Any] = []

    def run_all(specs: Any, runs: Any, **_: Any) -> None:
        begun.extend(specs)
        for spec in specs:
            fb.run(spec, runs.of(spec).path, resume=True)

    monkeypatch.setitem(tune.__globals__, "run_all", run_all)
    return begun


def tuned(out: Path, **options: Any) -> list[Mapping[str, Any]]:
    sets = ["problem.name=quadratic", "data.clients=4", "algorithm.participation=2", "stop.rounds=10"]
    grid = ["algorithm.beta=0.001;0.1"]
    return list(tune("paper", sets, grid, seeds=1, out=out, jobs=1, console=Console(quiet=True), **options))


@pytest.mark.slow
def test_tune_compares_any_metric_and_the_upper_loss_by_default(
    tmp_path: Path, in_this_process: list[Any]
) -> None:
    rows = tuned(tmp_path / "own", metric="lower_gap")
    assert [row["algorithm.beta"] for row in rows] == [0.1, 0.001]
    assert rows[0]["lower_gap"] < rows[1]["lower_gap"]
    worst = tuned(tmp_path, metric="lower_gap", mode="max")
    assert [row["algorithm.beta"] for row in worst] == [0.001, 0.1]
    default = tuned(tmp_path)
    assert list(default[0]) == ["algorithm.beta", "upper_loss"]
    assert default[0]["upper_loss"] <= default[1]["upper_loss"]
    spec = load_spec(tmp_path / "best.toml")
    history = runner.Runs(tmp_path / "runs").history(spec)
    expected = in_window(history, "upper_loss", 500)["mean"]
    assert default[0]["upper_loss"] == pytest.approx(expected, rel=1e-3)


def test_an_unknown_metric_is_refused_before_the_grid_is_run(tmp_path: Path, in_this_process: list[Any]) -> None:
    with pytest.raises(UnknownName, match=r"--metric 'auc' is unknown; use one of: .*lower_gap"):
        tuned(tmp_path / "tuned", metric="auc")
    assert not in_this_process and not (tmp_path / "tuned").exists()
