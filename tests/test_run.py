"""Runs of specs: what they write, when they stop, and that a resumed run is the uninterrupted one."""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree
from safetensors.numpy import load_file

from fedbilevel import Result, RunFolderError, SettingsError, Spec, TooFewReplies, load_spec, run
from fedbilevel.record import FILES, LOCK, SOMETIMES
from fedbilevel.run import Progress

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


def lines(folder: Path) -> list[bytes]:
    """The lines of the history as they are stored, but without seconds."""
    kept = []
    for line in (folder / "history.jsonl").read_bytes().splitlines(keepends=True):
        seconds = json.dumps(json.loads(line)["seconds"]).encode()
        kept.append(line.replace(b'"seconds": ' + seconds, b'"seconds"'))
    return kept


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
    names = {p.name for p in digits.folder.iterdir()}
    assert names - set(SOMETIMES) == {LOCK, *FILES}
    assert all((digits.folder / name).stat().st_size for name in names)
    assert load_spec(digits.folder / "spec.toml") == load_spec("paper", DIGITS)


def test_a_line_of_the_history_has_exactly_these_fields(digits: Result) -> None:
    stored = [json.loads(line) for line in (digits.folder / "history.jsonl").read_text().splitlines()]
    assert [list(record) for record in stored] == 5 * [FIELDS]
    assert stored == digits.history
    assert [r["iteration"] for r in stored] == [0, 1, 2, 3, 4]
    assert [r["rounds"] for r in stored] == [0, 5, 10, 15, 20]
    for field in ("bytes_up", "bytes_down", "seconds"):
        values = [r[field] for r in stored]
        assert values[0] == 0
        assert values == sorted(set(values))


def test_the_summary_has_these_keys(digits: Result) -> None:
    stored = json.loads((digits.folder / "summary.json").read_text())
    assert stored == digits.summary
    assert set(stored) >= {"rounds", "iterations", "compilations", "peak_memory_mb"}
    assert (stored["rounds"], stored["iterations"]) == (20, 4)
    levels = ["0.80", "0.85", "0.90", "0.95"]
    assert [list(stored[k]) for k in ("rounds_to", "bytes_to", "seconds_to")] == 3 * [levels]
    assert stored["rounds_to"]["0.95"] is None
    assert list(stored["accuracy"]) == ["last", "best", "mean_last_100", "std_last_100"]
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


def test_a_run_from_python_is_five_lines(tmp_path: Path) -> None:
    from fedbilevel import load_spec, run

    spec = load_spec("paper", {**NOISY, "stop.iterations": 2})
    result = run(spec, tmp_path / "first")
    assert result.summary["rounds"] == 14
    assert result.history[-1]["hypergradient_norm"] > 0


def test_the_final_parameters_come_back_as_the_users_pytrees(digits: Result) -> None:
    problem = load_spec("paper", DIGITS).task().problem
    assert jax.tree.structure(digits.x) == jax.tree.structure(problem.x)
    assert jax.tree.structure(digits.y) == jax.tree.structure(problem.y)
    stored = load_file(digits.folder / "checkpoint.safetensors")
    for name, start in (("x", problem.x), ("y", problem.y)):
        vector = np.asarray(ravel_pytree(getattr(digits, name))[0])
        np.testing.assert_array_equal(vector, stored[name])
        assert not np.array_equal(vector, np.asarray(ravel_pytree(start)[0]))
    scores = digits.y(digits.x(np.zeros((3, 64), np.float32)))
    assert scores.shape == (3, 10)


def test_the_same_spec_gives_the_same_run_and_another_seed_another(whole: Result, tmp_path: Path) -> None:
    same(whole.folder, run(noisy(), tmp_path / "again").folder)
    assert lines(run(noisy(seed=1), tmp_path / "other").folder) != lines(whole.folder)


def test_a_quadratic_run_records_the_true_hypergradient_and_draws_it(whole: Result) -> None:
    assert [list(record) for record in whole.history] == 9 * [[*FIELDS, "hypergradient_norm", "lower_gap"]]
    task = noisy().problem.make(6, 0)
    assert whole.history[-1]["hypergradient_norm"] == pytest.approx(
        np.linalg.norm(task.hypergradient(whole.x)), rel=1e-5
    )
    assert whole.history[-1]["test_accuracy"] is None
    assert whole.summary["accuracy"]["best"] is None
    assert (whole.folder / "curve.png").stat().st_size > 5000


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


def test_a_run_stops_at_the_accuracy_given(digits: Result, tmp_path: Path) -> None:
    accuracies = [r["test_accuracy"] for r in digits.history]
    first = int(np.argmax(accuracies))
    assert first > 0, "the run is to learn something, or this test tests nothing"
    stop = {"stop.iterations": None, "stop.accuracy": accuracies[first], "stop.rounds": 100}
    result = run(load_spec("paper", DIGITS | stop), tmp_path / "run")
    assert result.summary["iterations"] == first
    assert lines(result.folder) == lines(digits.folder)[: first + 1]


def test_evaluation_is_on_schedule_and_at_the_end(whole: Result, tmp_path: Path) -> None:
    result = run(noisy(evaluate__every=3), tmp_path / "run")
    assert [r["iteration"] for r in result.history] == [0, 3, 6, 8]
    assert lines(result.folder) == [lines(whole.folder)[i] for i in (0, 3, 6, 8)]


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
        ("federation.devices", 99, r"federation\.devices = 99 is wrong: JAX sees"),
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
    shutil.copytree(digits.folder, tmp_path / "earlier")
    with pytest.raises(SettingsError, match=message):
        run(spec, tmp_path / "earlier", overwrite=True)
    for name in FILES:
        assert (tmp_path / "earlier" / name).read_bytes() == (digits.folder / name).read_bytes()


def test_a_run_that_diverges_ends_with_the_client_the_step_and_a_remedy(tmp_path: Path) -> None:
    spec = noisy(algorithm__beta=1e30, algorithm__lam=1e30, problem__noise=0.0)
    with pytest.raises(TooFewReplies, match=r"client \d+: .* is not finite; try a smaller"):
        run(spec, tmp_path / "run")


# Resuming ---------------------------------------------------------------------------------------------


def test_a_run_resumed_with_a_larger_budget_equals_the_uninterrupted_one(whole: Result, tmp_path: Path) -> None:
    run(noisy(stop__iterations=4), tmp_path / "run")
    result = run(noisy(), tmp_path / "run", resume=True)
    same(tmp_path / "run", whole.folder)
    assert result.summary["rounds"] == whole.summary["rounds"]
    for name, account in whole.summary["ledger"].items():
        for field in ("rounds", "bytes_up", "bytes_down"):
            assert result.summary["ledger"][name][field] == account[field]
    np.testing.assert_array_equal(np.asarray(result.x), np.asarray(whole.x))


def test_the_last_evaluation_of_a_smaller_budget_does_not_stay_off_the_schedule(tmp_path: Path) -> None:
    run(noisy(evaluate__every=3), tmp_path / "whole")
    run(noisy(evaluate__every=3, stop__iterations=4), tmp_path / "run")
    run(noisy(evaluate__every=3), tmp_path / "run", resume=True)
    same(tmp_path / "run", tmp_path / "whole")


class Crash(Exception):
    pass


@pytest.mark.parametrize(("every", "crash"), [(3, 5), (100, 7)])
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
    same(tmp_path / "run", whole.folder)


def test_a_half_written_last_line_does_not_spoil_a_resumed_run(whole: Result, tmp_path: Path) -> None:
    run(noisy(stop__iterations=3), tmp_path / "run")
    with (tmp_path / "run" / "history.jsonl").open("a") as stream:
        stream.write('{"iteration": 4, "rou')
    run(noisy(), tmp_path / "run", resume=True)
    same(tmp_path / "run", whole.folder)


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


def test_a_run_is_not_resumed_with_another_spec(whole: Result, tmp_path: Path) -> None:
    shutil.copytree(whole.folder, tmp_path / "run")
    with pytest.raises(RunFolderError, match=r"algorithm\.alpha was 0\.01 and is 0\.02"):
        run(noisy(algorithm__alpha=0.02), tmp_path / "run", resume=True)
    same(tmp_path / "run", whole.folder)


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
    same(tmp_path / "run", whole.folder)
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
