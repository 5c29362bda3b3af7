"""Runs of specs: what they write, when they stop, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import shutil
import signal
import time
from collections.abc import Mapping
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
import optax
import pytest
from jax import Array
from jax.flatten_util import ravel_pytree
from safetensors.numpy import load_file

import fedbilevel as fb
import fedbilevel.problems.representation
from fedbilevel import AggITD, Progress, Result, RunFolderError, SettingsError, Spec, TooFewReplies, load_spec, run
from fedbilevel.federation import Federation
from fedbilevel.problem import BilevelProblem
from fedbilevel.problems import QuadraticTask
from fedbilevel.record import FILES, LOCK, SOMETIMES
from fedbilevel.spec import FederationSettings
from fedbilevel.steps import Draw, Sample, X, Y, client_step

FIELDS = [
    "iteration",
    "rounds",
    "bytes_up",
    "bytes_down",
    "seconds",
    "test_accuracy",
    "test_loss",
    "upper_loss",
    "lower_loss",
]
FIGURES = ["update_x", "update_y", "lower_residual", "hypergradient_estimate"]  # of the last iteration
DIGITS = {
    "data.name": "digits",
    "data.clients": 10,
    "data.partition": "iid",
    "problem.hidden": 4,
    "algorithm.participation": 3,
    "algorithm.lower_steps": 2,
    "algorithm.upper_steps": 1,
    "algorithm.alpha": 0.3,
    "algorithm.beta": 0.3,
    "evaluate.clients": 2,
    "stop.rounds": None,
    "stop.iterations": 4,
}
NOISY = {  # random cohorts, a random Q and random rows: whatever a resumed run could draw anew
    "federation.cohort": "iteration",
    "problem.name": "quadratic",
    "problem.noise": 0.5,
    "data.clients": 6,
    "algorithm.N": 2,
    "algorithm.participation": 3,
    "algorithm.lower_steps": 2,
    "algorithm.upper_steps": 2,
    "algorithm.batch_zeta_local": 2,
    "algorithm.batch_xi": 3,
    "evaluate.clients": 2,
    "evaluate.checkpoint_every": 1,
    "stop.rounds": None,
    "stop.iterations": 8,
}


def noisy(**more: Any) -> Spec:
    return load_spec("paper", NOISY | {k.replace("__", "."): v for k, v in more.items()})


def made() -> QuadraticTask:
    """The task of the noisy quadratic."""
    problem = noisy().problem
    assert isinstance(problem, fb.Quadratic)
    return problem.make(6, 0)


def structure(tree: Any) -> Any:
    """The structure of a pytree, without its leaves."""
    return jax.tree.structure(tree)


def lines(folder: Path) -> list[bytes]:
    """The lines of the history as they are stored, but without seconds."""
    kept = []
    for line in (folder / "history.jsonl").read_bytes().splitlines(keepends=True):
        seconds = json.dumps(json.loads(line)["seconds"]).encode()
        kept.append(line.replace(b'"seconds": ' + seconds, b'"seconds"'))
    return kept


def where(result: Result) -> Path:
    """The folder of a run that has one."""
    assert result.folder is not None
    return result.folder


def without_seconds(history: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in record.items() if name != "seconds"} for record in history]


def same(one: Path, other: Path) -> None:
    """The histories are equal byte for byte but for seconds, the checkpoints bit for bit."""
    assert lines(one) == lines(other)
    a, b = (load_file(folder / "checkpoint.safetensors") for folder in (one, other))
    assert a.keys() == b.keys()
    for name in a:
        assert a[name].tobytes() == b[name].tobytes(), name


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return run(load_spec("paper", DIGITS), tmp_path_factory.mktemp("runs") / "digits")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """Eight iterations of the noisy quadratic without interruption."""
    return run(noisy(), tmp_path_factory.mktemp("runs") / "whole")


# What a run writes ------------------------------------------------------------------------------------


def test_a_run_writes_all_its_files_and_nothing_else(digits: Result) -> None:
    names = {p.name for p in where(digits).iterdir()}
    assert names - set(SOMETIMES) == {LOCK, *FILES}
    assert all((where(digits) / name).stat().st_size for name in names)
    assert load_spec(where(digits) / "spec.toml") == load_spec("paper", DIGITS)


def test_a_line_of_the_history_has_exactly_these_fields(digits: Result) -> None:
    stored = [json.loads(line) for line in (where(digits) / "history.jsonl").read_text().splitlines()]
    assert [list(record) for record in stored] == [FIELDS, *4 * [[*FIELDS, *FIGURES]]]
    assert stored == digits.history
    assert [r["iteration"] for r in stored] == [0, 1, 2, 3, 4]
    assert [r["rounds"] for r in stored] == [0, 5, 10, 15, 20]
    for field in ("bytes_up", "bytes_down", "seconds"):
        values = [r[field] for r in stored]
        assert values[0] == 0
        assert values == sorted(set(values))


def test_the_summary_has_these_keys(digits: Result) -> None:
    stored = json.loads((where(digits) / "summary.json").read_text())
    assert stored == digits.summary
    assert set(stored) >= {"rounds", "iterations", "compilations", "peak_memory_mb"}
    assert (stored["rounds"], stored["iterations"]) == (20, 4)
    levels = ["0.80", "0.85", "0.90", "0.95"]
    assert [list(stored[k]) for k in ("rounds_to", "bytes_to", "seconds_to")] == 3 * [levels]
    assert stored["rounds_to"]["0.95"] is None
    assert list(stored["accuracy"]) == ["last", "best", "mean", "std", "window"]
    assert stored["accuracy"]["last"] == digits.history[-1]["test_accuracy"]
    assert {name: account["rounds"] for name, account in stored["ledger"].items()} == {
        "gradients": 8,
        "lower_steps": 4,
        "hypergradient": 4,
        "upper_steps": 4,
    }
    for account in stored["ledger"].values():
        assert set(account) >= {"rounds", "bytes_up", "bytes_down", "seconds"}
    for field in ("bytes_up", "bytes_down"):
        assert sum(a[field] for a in stored["ledger"].values()) == digits.history[-1][field]
    assert stored["compilations"] > 0
    assert 50 < stored["peak_memory_mb"] < 100_000


@pytest.mark.slow
def test_a_run_from_python_is_five_lines(tmp_path: Path) -> None:
    from fedbilevel import load_spec, run

    spec = load_spec("paper", {**NOISY, "stop.iterations": 2})
    result = run(spec, tmp_path / "first")
    assert result.summary["rounds"] == 14
    assert result.history[-1]["hypergradient_norm"] > 0


def test_the_final_parameters_come_back_as_the_users_pytrees(digits: Result) -> None:
    problem = load_spec("paper", DIGITS).task().problem
    assert isinstance(problem, fb.Problem)
    assert structure(digits.x) == structure(problem.x)
    assert structure(digits.y) == structure(problem.y)
    stored = load_file(where(digits) / "checkpoint.safetensors")
    for name, start in (("x", problem.x), ("y", problem.y)):
        vector = np.asarray(ravel_pytree(getattr(digits, name))[0])
        np.testing.assert_array_equal(vector, stored[name])
        assert not np.array_equal(vector, np.asarray(ravel_pytree(start)[0]))
    scores = digits.y(digits.x(np.zeros((3, 64), np.float32)))
    assert scores.shape == (3, 10)


@pytest.mark.slow
def test_the_same_spec_gives_the_same_run_and_another_seed_another(whole: Result, tmp_path: Path) -> None:
    same(where(whole), where(run(noisy(), tmp_path / "again")))
    assert lines(where(run(noisy(seed=1), tmp_path / "other"))) != lines(where(whole))


def test_a_quadratic_run_records_the_true_hypergradient_and_draws_it(whole: Result) -> None:
    own = ["hypergradient_norm", "lower_gap"]
    assert [list(record) for record in whole.history] == [[*FIELDS, *own], *8 * [[*FIELDS, *FIGURES, *own]]]
    task = made()
    assert whole.history[-1]["hypergradient_norm"] == pytest.approx(
        np.linalg.norm(task.hypergradient(whole.x)), rel=1e-5
    )
    assert whole.history[-1]["test_accuracy"] is None
    assert whole.summary["accuracy"]["best"] is None
    assert (where(whole) / "curve.png").stat().st_size > 5000


def test_the_loop_engine_gives_the_same_run_through_a_spec(whole: Result, tmp_path: Path) -> None:
    result = run(noisy(federation__engine="loop", stop__iterations=3), tmp_path / "loop")
    for ours, theirs in zip(result.history, whole.history[:4], strict=True):
        for field in ("iteration", "rounds", "bytes_up", "bytes_down"):
            assert ours[field] == theirs[field]
        for field in ("upper_loss", "lower_loss", "hypergradient_norm"):
            assert ours[field] == pytest.approx(theirs[field], rel=1e-4, abs=1e-5)


# When a run stops, and when it is measured ------------------------------------------------------------


@pytest.mark.parametrize(("budget", "rounds"), [(7, 7), (13, 7), (14, 14)])
def test_a_budget_of_rounds_is_used_as_far_as_whole_iterations_go_and_never_exceeded(
    budget: int, rounds: int, tmp_path: Path
) -> None:
    result = run(noisy(stop__iterations=None, stop__rounds=budget), tmp_path / "run")
    assert result.summary["rounds"] == rounds <= budget


def test_the_first_limit_that_is_reached_ends_the_run(tmp_path: Path) -> None:
    result = run(noisy(stop__iterations=2, stop__rounds=100, stop__seconds=1e6), tmp_path / "run")
    assert result.summary["iterations"] == 2


def test_a_run_stops_after_the_seconds_given(tmp_path: Path) -> None:
    result = run(noisy(stop__iterations=None, stop__seconds=1e-9), tmp_path / "run")
    assert result.summary["iterations"] == 1


@pytest.mark.slow
def test_a_run_stops_at_the_accuracy_given(digits: Result, tmp_path: Path) -> None:
    accuracies = [r["test_accuracy"] for r in digits.history]
    first = int(np.argmax(accuracies))
    assert first > 0, "the run is to learn something, or this test tests nothing"
    stop = {"stop.iterations": None, "stop.accuracy": accuracies[first], "stop.rounds": 100}
    result = run(load_spec("paper", DIGITS | stop), tmp_path / "run")
    assert result.summary["iterations"] == first
    assert lines(where(result)) == lines(where(digits))[: first + 1]


def test_evaluation_is_on_schedule_and_at_the_end(whole: Result, tmp_path: Path) -> None:
    result = run(noisy(evaluate__every=3), tmp_path / "run")
    assert [r["iteration"] for r in result.history] == [0, 3, 6, 8]
    assert lines(where(result)) == [lines(where(whole))[i] for i in (0, 3, 6, 8)]


def test_an_observer_is_told_every_iteration_and_a_share_that_grows_to_one(tmp_path: Path) -> None:
    seen: list[Progress] = []
    run(noisy(stop__rounds=30, stop__iterations=None), tmp_path / "run", observers=[seen.append])
    assert [p.iteration for p in seen] == [1, 2, 3, 4]
    assert [p.rounds for p in seen] == [7, 14, 21, 28]
    assert [p.share for p in seen] == [7 / 30, 14 / 30, 21 / 30, 1.0]
    assert [p.record["iteration"] for p in seen] == [1, 2, 3, 4]


# What is refused leaves no trace ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("federation.engine.devices", 99, r"federation\.engine\.devices = 99 is wrong: JAX sees"),
        ("data.clients", 5000, "5000"),
    ],
)
def test_what_only_the_data_or_the_machine_can_tell_is_told_before_the_folder_is_made(
    setting: str, value: Any, message: str, digits: Result, tmp_path: Path
) -> None:
    spec = load_spec("paper", DIGITS | {setting: value})
    with pytest.raises(SettingsError, match=message):
        run(spec, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    shutil.copytree(where(digits), tmp_path / "earlier")
    with pytest.raises(SettingsError, match=message):
        run(spec, tmp_path / "earlier", overwrite=True)
    for name in FILES:
        assert (tmp_path / "earlier" / name).read_bytes() == (where(digits) / name).read_bytes()


def test_a_run_that_diverges_ends_with_the_client_the_step_and_a_remedy(tmp_path: Path) -> None:
    spec = noisy(algorithm__beta=1e30, algorithm__lam=1e30, problem__noise=0.0)
    with pytest.raises(
        TooFewReplies,
        match=r"client \d+: .* is not finite; .*algorithm\.(beta|lam) = 1e\+30 is too large .*: try 1",
    ):
        run(spec, tmp_path / "run")


# Resuming ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_resumed_with_a_larger_budget_equals_the_uninterrupted_one(whole: Result, tmp_path: Path) -> None:
    run(noisy(stop__iterations=4), tmp_path / "run")
    result = run(noisy(), tmp_path / "run", resume=True)
    same(tmp_path / "run", where(whole))
    assert result.summary["rounds"] == whole.summary["rounds"]
    for name, account in whole.summary["ledger"].items():
        for field in ("rounds", "bytes_up", "bytes_down"):
            assert result.summary["ledger"][name][field] == account[field]
    np.testing.assert_array_equal(np.asarray(result.x), np.asarray(whole.x))


@pytest.mark.slow
def test_the_last_evaluation_of_a_smaller_budget_does_not_stay_off_the_schedule(tmp_path: Path) -> None:
    run(noisy(evaluate__every=3), tmp_path / "whole")
    run(noisy(evaluate__every=3, stop__iterations=4), tmp_path / "run")
    run(noisy(evaluate__every=3), tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")


class Crash(Exception):
    pass


@pytest.mark.parametrize(("every", "crash"), [(3, 5), (100, 7)])
@pytest.mark.slow
def test_a_run_that_died_between_checkpoints_equals_the_uninterrupted_one(
    every: int, crash: int, whole: Result, tmp_path: Path
) -> None:
    def dies(progress: Progress) -> None:
        if progress.iteration == crash:
            raise Crash

    spec = noisy(evaluate__checkpoint_every=every)
    with pytest.raises(Crash):
        run(spec, tmp_path / "run", observers=[dies])
    assert len(lines(tmp_path / "run")) == crash + 1
    run(spec, tmp_path / "run", resume=True)
    same(tmp_path / "run", where(whole))


@pytest.mark.slow
def test_a_half_written_last_line_does_not_spoil_a_resumed_run(whole: Result, tmp_path: Path) -> None:
    run(noisy(stop__iterations=3), tmp_path / "run")
    with (tmp_path / "run" / "history.jsonl").open("a") as stream:
        stream.write('{"iteration": 4, "rou')
    run(noisy(), tmp_path / "run", resume=True)
    same(tmp_path / "run", where(whole))


@pytest.mark.parametrize("every", [1, 3])
def test_resuming_a_finished_run_changes_nothing(every: int, tmp_path: Path) -> None:
    spec = noisy(evaluate__every=every, stop__iterations=4)
    before = run(spec, tmp_path / "run")
    kept = {name: (tmp_path / "run" / name).read_bytes() for name in ("history.jsonl", "checkpoint.safetensors")}
    after = run(spec, tmp_path / "run", resume=True)
    assert {name: (tmp_path / "run" / name).read_bytes() for name in kept} == kept
    assert after.history == before.history
    assert after.summary["ledger"] == before.summary["ledger"]
    np.testing.assert_array_equal(np.asarray(after.y), np.asarray(before.y))


def test_a_run_of_an_older_version_is_resumed_with_a_setting_that_was_added_since(
    whole: Result, tmp_path: Path
) -> None:
    spec, out = noisy(stop__iterations=5), tmp_path / "run"
    run(spec, out)
    text = (out / "spec.toml").read_text()
    assert text.count("checkpoint_every = 1\n") == text.count("retries = 0\n") == 1
    (out / "spec.toml").write_text(text.replace("retries = 0\n", ""))
    run(noisy(), out, resume=True)
    same(out, where(whole))
    (out / "spec.toml").write_text(text.replace("checkpoint_every = 1\n", ""))
    with pytest.raises(RunFolderError, match=r"evaluate\.checkpoint_every was None and is 1"):
        run(noisy(), out, resume=True)


def test_a_resumed_run_may_have_another_window(whole: Result, tmp_path: Path) -> None:
    run(noisy(stop__iterations=5), tmp_path / "run")
    result = run(noisy(evaluate__window=7), tmp_path / "run", resume=True)
    assert result.summary["accuracy"]["window"] == 7
    same(where(result), where(whole))


def test_the_training_accuracy_is_that_of_all_rows_of_all_clients(digits: Result, tmp_path: Path) -> None:
    spec = load_spec("paper", DIGITS | {"evaluate.train": True})
    result = run(spec, tmp_path / "run")
    for record, plain in zip(without_seconds(result.history), without_seconds(digits.history), strict=True):
        assert {k: v for k, v in record.items() if not k.startswith("train_")} == plain
    task = spec.task()
    rows = [part for i in range(task.clients.count) for part in task.clients.load(i).parts.values()]
    inputs, targets = (np.concatenate([part[j] for part in rows]) for j in (0, 1))
    scores = result.y(result.x(inputs))
    accuracy = np.mean(np.argmax(scores, -1) == targets)
    loss = optax.softmax_cross_entropy_with_integer_labels(scores, targets).mean()
    last = result.history[-1]
    assert last["train_accuracy"] == pytest.approx(float(accuracy), rel=1e-5)
    assert last["train_loss"] == pytest.approx(float(loss), rel=1e-5)
    assert result.summary["train_accuracy"]["last"] == last["train_accuracy"]
    assert "train_accuracy" not in digits.summary and "train_accuracy" not in digits.history[-1]


def test_training_rows_are_measured_in_blocks_whose_mean_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    task = load_spec("paper", DIGITS).task()
    x, y = task.problem.flat_x.vector, task.problem.flat_y.vector
    assert task.measure_train is not None
    whole = task.measure_train(x, y)
    monkeypatch.setattr(fedbilevel.problems.representation, "BLOCK", 400)
    blocks = load_spec("paper", DIGITS).task().measure_train
    assert blocks is not None
    assert {k: float(v) for k, v in blocks(x, y).items()} == pytest.approx(
        {k: float(v) for k, v in whole.items()}, rel=1e-5
    )


def test_a_run_is_not_resumed_with_another_spec(whole: Result, tmp_path: Path) -> None:
    shutil.copytree(where(whole), tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"algorithm\.alpha was 0\.01 and is 0\.02"):
        run(noisy(algorithm__alpha=0.02), tmp_path / "run", resume=True)
    same(tmp_path / "run", where(whole))


@pytest.mark.slow
def test_a_run_killed_at_three_random_moments_equals_the_uninterrupted_one(
    tmp_path: Path,
) -> None:
    spec = load_spec("paper", DIGITS | {"stop.iterations": 50, "evaluate.checkpoint_every": 7})
    whole = run(spec, tmp_path / "whole")
    server = multiprocessing.get_context("forkserver")  # imports once; JAX starts anew in every process
    server.set_forkserver_preload(["fedbilevel.cli", "sklearn.datasets"])
    moments = np.random.default_rng(0)
    for _ in range(3):  # benchmarks/kill_and_resume.py: a hundred
        process = server.Process(target=run, args=(spec, tmp_path / "run"), kwargs={"resume": True})
        process.start()
        try:
            _wait_for_lines(process, tmp_path / "run" / "history.jsonl", int(moments.integers(1, 10)))
            time.sleep(moments.uniform(0, 0.03))  # somewhere within an iteration, an evaluation or a write
            assert process.is_alive(), "the run ended before it was killed; give it more iterations"
        finally:
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join()
        assert process.exitcode == -signal.SIGKILL
    assert not (tmp_path / "run" / "summary.json").exists()
    process = server.Process(target=run, args=(spec, tmp_path / "run"), kwargs={"resume": True})
    process.start()
    process.join()
    assert process.exitcode == 0
    same(tmp_path / "run", where(whole))
    assert (tmp_path / "run" / "summary.json").exists()


def _wait_for_lines(process: BaseProcess, history: Path, count: int) -> None:
    """Wait until this process has added so many lines to the history it found, which it first rewrites."""
    before = history.stat().st_ino if history.exists() else None
    start = None
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.is_alive(), "the run ended by itself"
        if history.exists() and history.stat().st_ino != before:
            found = history.read_bytes().count(b"\n")
            start = found if start is None else start
            if found >= start + count:
                return
        time.sleep(0.001)
    raise AssertionError(f"{history} did not grow within two minutes")


# Runs of objects --------------------------------------------------------------------------------------


class Gradients(NamedTuple):
    h: X
    q: Y


@client_step
def gradients(c: fb.Oracle, xi: Draw, zeta: Draw) -> Gradients:
    """Both gradients at the held x and y, from a few rows."""
    return Gradients(c.f_x(c.y, xi), c.g_y(c.y, zeta))


class AdamState(NamedTuple):
    x: Array
    y: Array
    upper: optax.OptState
    lower: optax.OptState
    steps: int


class Adam:
    """A method of the user's own, which is no settings class: Adam on both levels, at the server."""

    needs_server: ClassVar[bool] = True

    def __init__(self, rate: float) -> None:
        self.optimiser = optax.adam(rate)

    def init(self, problem: BilevelProblem, clients: int) -> AdamState:
        x, y = problem.flat_x.vector, problem.flat_y.vector
        return AdamState(x, y, self.optimiser.init(x), self.optimiser.init(y), 0)

    def step(self, fed: Federation, s: AdamState) -> AdamState:
        fed = fed.cohort(3)
        fed.hold(x=s.x, y=s.y)
        h, q = fed.round(gradients, xi=Sample("upper", 2), zeta=Sample("lower", 2))
        move_x, upper = self.optimiser.update(h, s.upper)
        move_y, lower = self.optimiser.update(q, s.lower)
        return AdamState(s.x + move_x, s.y + move_y, upper, lower, s.steps + 1)


class Twice(AggITD):
    """A subclass without settings of its own: two outer iterations in one."""

    def step(self, fed: Federation, s: Any) -> Any:
        return super().step(fed, super().step(fed, s))


@fb.settings
class Scaled(AggITD):
    """A subclass with a setting of its own."""

    factor: Annotated[float, fb.about("what the hypergradient's solution is multiplied by")] = 1.0

    def improve(self, fed: Federation, s: Any, p: Array) -> Any:
        return super().improve(fed, s, self.factor * p)


def problem_and_clients() -> tuple[fb.Problem, fb.Clients]:
    task = made()
    return task.problem, task.clients


METHOD: dict[str, Any] = dict(N=2, participation=3, lower_steps=2, upper_steps=2, batch_zeta_local=2, batch_xi=3)
METHODS: dict[str, fb.Algorithm] = {
    "a method of the library": AggITD(**METHOD),
    "a method of one's own, with Adam": Adam(0.05),
}
OFTEN = {"clients": 2, "checkpoint_every": 3}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Result]:
    """Eight iterations of each method with a folder, without interruption."""
    problem, clients = problem_and_clients()
    place = tmp_path_factory.mktemp("trained")
    return {
        name: fb.train(problem, clients, method, stop={"iterations": 8}, evaluate=OFTEN, out=place / str(number))
        for number, (name, method) in enumerate(METHODS.items())
    }


def test_one_line_of_objects_is_a_whole_run() -> None:
    problem, clients = problem_and_clients()
    method = AggITD(**METHOD)
    result = fb.train(problem, clients, method, stop={"rounds": 60})
    assert result.folder is None
    assert result.summary["rounds"] == 56 <= 60
    assert [record["rounds"] for record in result.history] == list(range(0, 57, 7))
    assert result.history[-1]["upper_loss"] < result.history[0]["upper_loss"]
    assert structure(result.x) == structure(problem.x)


@pytest.mark.parametrize("name", METHODS)
def test_a_run_without_a_folder_is_the_run_with_one_and_writes_nothing(
    name: str, trained: dict[str, Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    problem, clients = problem_and_clients()
    result = fb.train(problem, clients, METHODS[name], stop={"iterations": 8}, evaluate=OFTEN)
    assert result.folder is None
    assert list(tmp_path.iterdir()) == []
    assert without_seconds(result.history) == without_seconds(trained[name].history)
    for one, other in ((result.x, trained[name].x), (result.y, trained[name].y)):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_a_run_of_objects_is_the_run_of_the_spec_that_makes_them(whole: Result) -> None:
    spec = noisy()
    problem, clients = problem_and_clients()
    parts: dict[str, Any] = dict(stop=spec.stop, evaluate=spec.evaluate, federation=spec.federation)
    result = fb.train(problem, clients, spec.algorithm, **parts, measure=spec.task().measure)
    assert without_seconds(result.history) == without_seconds(whole.history)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_a_run_of_objects_that_died_between_checkpoints_is_resumed_bit_for_bit(
    name: str, trained: dict[str, Result], tmp_path: Path
) -> None:
    def dies(progress: Progress) -> None:
        if progress.iteration == 5:
            raise Crash

    problem, clients = problem_and_clients()
    options: dict[str, Any] = dict(stop={"iterations": 8}, evaluate=OFTEN, out=tmp_path / "run")
    with pytest.raises(Crash):
        fb.train(problem, clients, METHODS[name], **options, observers=[dies])
    result = fb.train(problem, clients, METHODS[name], **options, resume=True)
    same(where(result), where(trained[name]))
    assert without_seconds(result.history) == without_seconds(trained[name].history)


def test_the_state_of_an_optimiser_is_in_the_checkpoint(trained: dict[str, Result]) -> None:
    stored = load_file(where(trained["a method of one's own, with Adam"]) / "checkpoint.safetensors")
    assert {"x", "y", "upper.0.mu", "upper.0.nu", "upper.0.count", "lower.0.mu", "steps"} <= stored.keys()
    assert int(stored["upper.0.count"]) == int(stored["steps"]) == 8
    assert np.abs(stored["upper.0.mu"]).max() > 0


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("name", METHODS)
@pytest.mark.slow
def test_an_observer_that_returns_true_ends_a_run_which_can_be_resumed(
    name: str, every: int, tmp_path: Path
) -> None:
    problem, clients = problem_and_clients()

    def train(folder: str, **more: Any) -> Result:
        rules = {"clients": 2, "every": every, "checkpoint_every": 100}
        budget = {"iterations": 8}
        return fb.train(
            problem, clients, METHODS[name], stop=budget, evaluate=rules, out=tmp_path / folder, **more
        )

    whole, seen = train("whole"), list[int]()

    def fourth(progress: Progress) -> bool:
        return progress.iteration == 4

    def all_of_them(progress: Progress) -> None:
        seen.append(progress.iteration)

    ended = train("run", observers=[fourth, all_of_them])
    assert seen == [1, 2, 3, 4]
    assert (ended.summary["ended_by"], ended.summary["iterations"]) == ("observer", 4)
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == ended.summary
    assert ended.history[-1]["iteration"] == 4
    stored = load_file(tmp_path / "run" / "checkpoint.safetensors")
    np.testing.assert_array_equal(stored["x"], np.asarray(ended.x))
    resumed = train("run", resume=True)
    assert "ended_by" not in resumed.summary
    same(tmp_path / "run", tmp_path / "whole")
    assert without_seconds(resumed.history) == without_seconds(whole.history)


def test_an_observer_that_says_so_at_the_end_of_the_budget_changes_nothing(whole: Result, tmp_path: Path) -> None:
    def last(progress: Progress) -> bool:
        return progress.iteration == 8

    result = run(noisy(), tmp_path / "run", observers=[last])
    assert "ended_by" not in result.summary
    same(tmp_path / "run", where(whole))


@pytest.mark.parametrize("answer", [None, False, 0, 1, "yes"])
def test_only_true_itself_ends_a_run(answer: Any) -> None:
    problem, clients = problem_and_clients()
    result = fb.train(problem, clients, Adam(0.05), stop={"iterations": 3}, observers=[lambda progress: answer])
    assert result.summary["iterations"] == 3


# Methods derived from the library's -------------------------------------------------------------------


@pytest.mark.parametrize(("method", "rounds"), [(Twice(**METHOD), 28), (Scaled(**METHOD, factor=0.5), 14)])
@pytest.mark.slow
def test_a_subclass_of_a_method_runs_from_objects_and_from_a_spec(
    method: AggITD, rounds: int, tmp_path: Path
) -> None:
    problem, clients = problem_and_clients()
    result = fb.train(problem, clients, method, stop={"iterations": 2}, out=tmp_path / "objects")
    assert result.summary["rounds"] == rounds
    spec = dataclasses.replace(noisy(stop__iterations=2), algorithm=method)
    again = run(spec, tmp_path / "spec")
    assert again.summary["rounds"] == rounds
    np.testing.assert_array_equal(np.asarray(again.x), np.asarray(result.x))
    assert load_spec(tmp_path / "spec" / "spec.toml") == spec
    resumed = run(dataclasses.replace(spec, stop=noisy(stop__iterations=3).stop), tmp_path / "spec", resume=True)
    assert resumed.summary["iterations"] == 3


def test_a_subclass_is_not_resumed_with_another_setting(tmp_path: Path) -> None:
    problem, clients = problem_and_clients()
    options: dict[str, Any] = dict(stop={"iterations": 1}, out=tmp_path / "run")
    fb.train(problem, clients, Twice(**METHOD), **options)
    with pytest.raises(RunFolderError, match=r"algorithm\.alpha was 0\.01 and is 0\.5"):
        fb.train(problem, clients, Twice(**METHOD, alpha=0.5), **options, resume=True)


def test_a_subclass_is_named_in_a_spec_by_its_address(tmp_path: Path) -> None:
    address = f"{__name__}:Scaled"
    spec = noisy(algorithm__name="python", algorithm__class=address, algorithm__factor=0.5, stop__iterations=2)
    method = Scaled(**METHOD, factor=0.5)
    assert spec.algorithm == method
    result = run(spec, tmp_path / "run")
    problem, clients = problem_and_clients()
    again = fb.train(problem, clients, method, stop={"iterations": 2})
    np.testing.assert_array_equal(np.asarray(again.x), np.asarray(result.x))


# Engines ----------------------------------------------------------------------------------------------


class Watched(fb.Simulation):
    """An engine that remembers how often it was closed."""

    closed = 0

    def close(self) -> None:
        self.closed += 1
        super().close()


MADE: list[Watched] = []


@fb.settings
class WatchedSettings:
    """An engine of the user's own, as a settings class."""

    def build(self, problem: BilevelProblem, clients: fb.Clients) -> Watched:
        MADE.append(Watched(problem, clients))
        return MADE[-1]


@pytest.mark.parametrize("engine", ["loop", {"name": "loop"}, "simulation", {"name": "simulation", "over": "map"}])
def test_an_engine_is_given_by_its_name_or_as_a_table(
    engine: str | Mapping[str, Any], trained: dict[str, Result], tmp_path: Path
) -> None:
    problem, clients = problem_and_clients()
    method = METHODS["a method of the library"]
    options: dict[str, Any] = dict(stop={"iterations": 2}, evaluate=OFTEN, engine=engine)
    result = fb.train(problem, clients, method, **options, out=tmp_path / "run")
    for ours, theirs in zip(result.history, trained["a method of the library"].history[:3], strict=True):
        assert ours["bytes_up"] == theirs["bytes_up"]
        assert ours["upper_loss"] == pytest.approx(theirs["upper_loss"], rel=1e-4, abs=1e-5)
    written = (tmp_path / "run" / "spec.toml").read_text()
    assert f'[federation.engine]\nname = "{engine if isinstance(engine, str) else engine["name"]}"' in written


def test_an_engine_that_is_given_as_an_object_is_left_open() -> None:
    problem, clients = problem_and_clients()
    engine = Watched(problem, clients)
    first = fb.train(problem, clients, Adam(0.05), stop={"iterations": 2}, engine=engine)
    again = fb.train(problem, clients, Adam(0.05), stop={"iterations": 2}, engine=engine)
    assert engine.closed == 0
    assert without_seconds(first.history) == without_seconds(again.history)
    engine.close()


@pytest.mark.parametrize("fails", [False, True])
def test_an_engine_that_a_run_makes_is_closed_by_it(fails: bool) -> None:
    problem, clients = problem_and_clients()

    def dies(progress: Progress) -> None:
        if fails:
            raise Crash

    options: dict[str, Any] = dict(stop={"iterations": 1}, observers=[dies])
    rules = FederationSettings(engine=WatchedSettings())
    if fails:
        with pytest.raises(Crash):
            fb.train(problem, clients, Adam(0.05), federation=rules, **options)
    else:
        fb.train(problem, clients, Adam(0.05), federation=rules, **options)
    assert MADE[-1].closed == 1


def test_a_run_of_a_spec_takes_another_task_and_engine(whole: Result, tmp_path: Path) -> None:
    task = noisy().task()
    engine = Watched(task.problem, task.clients)
    result = run(noisy(), tmp_path / "run", task=task, engine=engine)
    same(where(result), where(whole))
    assert engine.closed == 0
    engine.close()


# What train refuses -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"stop": {}}, "stop has no limit; set stop.rounds"),
        ({"stop": {"round": 5}}, r"stop\.round is not a setting; did you mean rounds\?"),
        ({"stop": {"rounds": "5"}}, r"stop\.rounds = '5' is wrong"),
        ({"stop": {"rounds": 0}}, r"stop\.rounds = 0 is wrong"),
        ({"evaluate": {"every": 0}}, r"evaluate\.every = 0 is wrong"),
        (
            {"engine": "nobody"},
            r"federation\.engine\.name = 'nobody' is unknown; use one of: auto, batched, fused, loop",
        ),
        ({"engine": {"name": "loop", "actors": 2}}, r"federation\.engine\.actors is not a setting"),
        ({"engine": {"name": "simulation", "devices": 99}}, r"federation\.engine\.devices = 99 is wrong: JAX"),
        (
            {"federation": {"engine": 3}},
            r"federation\.engine = 3 is wrong: use one of: auto, batched, fused, loop",
        ),
        ({"federation": {"min_replies": 7}}, r"federation\.min_replies = 7 is wrong: there are 6 clients"),
        (
            {"federation": {"aggregator": {"name": "median", "share": 0.1}}},
            r"federation\.aggregator\.share is not",
        ),
        ({"privacy": {"mode": "centrl"}}, r"privacy\.mode = 'centrl' is wrong"),
        (
            {"privacy": {"mode": "central"}, "federation": {"aggregator": "median"}},
            r"federation\.aggregator is wrong with privacy\.mode = 'central'",
        ),
        (
            {"privacy": {"mode": "local"}, "federation": {"oversample": 0.5}},
            r"federation\.oversample = 0\.5 is wrong with privacy",
        ),
        ({"attack": {"kind": "lie"}}, r"attack\.kind = 'lie' is wrong"),
        ({"attack": {"kind": "label-flip"}}, r"attack\.kind = 'label-flip' is wrong"),
        ({"chaos": {"drop": 2.0}}, r"chaos\.drop = 2\.0 is wrong"),
        ({"algorithm": AggITD(lower_steps=(1, 2))}, r"algorithm\.lower_steps has 2 numbers for 6 clients"),
        ({"algorithm": AggITD(participation=7)}, r"algorithm\.participation = 7 is wrong: there are 6 clients"),
        ({"test": fb.Part({}, None)}, "test has rows, and the problem has no metrics"),
        ({"evaluate": {"train": True}}, r"evaluate\.train = true is wrong: this problem has no measure"),
    ],
)
def test_a_wrong_part_of_a_run_is_one_line_that_names_the_field_and_leaves_no_folder(
    wrong: dict[str, Any], message: str, tmp_path: Path
) -> None:
    problem, clients = problem_and_clients()
    given: dict[str, Any] = {"algorithm": AggITD(**METHOD), "stop": {"iterations": 1}} | wrong
    with pytest.raises(SettingsError, match=message) as raised:
        fb.train(problem, clients, **given, out=tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["resume", "overwrite"])
def test_a_run_without_a_folder_has_nothing_to_resume_or_overwrite(option: str) -> None:
    problem, clients = problem_and_clients()
    more: dict[str, Any] = {option: True}
    with pytest.raises(SettingsError, match="resume and overwrite need a run folder; give out"):
        fb.train(problem, clients, Adam(0.05), stop={"iterations": 1}, **more)


def test_an_engine_of_another_problem_or_of_other_clients_is_refused(quadratic: QuadraticTask) -> None:
    engine = fb.Loop(quadratic.problem, quadratic.clients)
    fewer = fb.ListedClients(quadratic.clients.data[:3])
    with pytest.raises(fb.SettingsError, match=r"engine was made for 20 clients .* 3 clients"):
        fb.train(quadratic.problem, fewer, fb.AggITD(participation=1.0), engine=engine, stop={"rounds": 5})
