"""`train_many`: many runs in one program, each with the record that it would have alone."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.problems import Quadratic, QuadraticTask

pytestmark = pytest.mark.slow
SEEDS = (0, 3)


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    """Six clients, whose rows differ, so that a minibatch matters."""
    return Quadratic(size_x=3, size_y=4, noise=1.0).make(clients=6, seed=0)


@pytest.fixture(scope="module")
def engine(task: QuadraticTask) -> fb.Fused:
    """It keeps its programs from one call to the next."""
    return fb.Fused(task.problem, task.clients)


OPTIONS: dict[str, Any] = dict(stop={"iterations": 6}, evaluate={"every": 4})


def many(engine: fb.Fused, method: Any, settings: list[dict[str, Any]], **more: Any) -> list[fb.Result]:
    options: dict[str, Any] = dict(engine=engine, seeds=SEEDS) | OPTIONS | more
    return fb.train_many(engine.problem, engine.clients, method, settings=settings, **options)


def alone(engine: fb.Fused, method: Any, own: dict[str, Any], seed: int, **more: Any) -> fb.Result:
    """One of the runs by itself, also if it diverges."""
    for name, value in own.items():
        outer, _, inner = name.rpartition(".")
        value = getattr(method, outer).having(inner, value) if outer else value
        method = dataclasses.replace(method, **{outer or name: value})
    try:
        return fb.train(engine.problem, engine.clients, method, engine=engine, seed=seed, **OPTIONS | more)
    except fb.Diverged as error:
        assert isinstance(error.result, fb.Result)
        return error.result


def books(result: fb.Result) -> Any:
    """The ledger and the probes without their seconds."""
    return {
        (book, step): {name: value for name, value in account.items() if name != "seconds"}
        for book in ("ledger", "probes")
        for step, account in result.summary[book].items()
    }


def agree(one: fb.Result, other: fb.Result) -> None:
    """The same parameters and history up to rounding, and exactly the same books and reason."""
    for a, b in zip(jax.tree.leaves((one.x, one.y)), jax.tree.leaves((other.x, other.y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert books(one) == books(other)
    assert one.failure == other.failure
    assert one.summary.keys() == other.summary.keys()
    assert one.summary["spec"] == other.summary["spec"]
    assert len(one.history) == len(other.history)
    for line, same in zip(one.history, other.history, strict=True):
        assert line.keys() == same.keys()
        for name in set(line) - {"seconds"}:
            if line[name] is not None or same[name] is not None:
                assert line[name] == pytest.approx(same[name], rel=1e-4, abs=1e-5), name


METHOD = fb.AggITD(
    N=2, alpha=0.1, beta=0.1, lam=0.3, participation=3, lower_steps=2, batch_zeta_local=3, batch_xi=4
)
STEPS: list[dict[str, Any]] = [{"alpha": 0.05, "beta": 0.2}, {"alpha": 0.2, "lam": 0.1}, {"beta": 90.0}]


@pytest.fixture(scope="module")
def results(engine: fb.Fused) -> list[fb.Result]:
    return many(engine, METHOD, STEPS)


def test_runs_with_a_drawn_Q_have_the_records_of_single_runs(engine: fb.Fused, results: list[fb.Result]) -> None:
    """The seeds draw different Q, so their instructions differ. The results are in order."""
    agree(results[1], alone(engine, METHOD, STEPS[0], 3))
    agree(results[2], alone(engine, METHOD, STEPS[1], 0))


def test_a_run_that_diverges_is_marked_with_the_reason_of_a_single_run(
    engine: fb.Fused, results: list[fb.Result]
) -> None:
    assert [result.failure is None for result in results] == [True] * 4 + [False] * 2
    agree(results[4], alone(engine, METHOD, STEPS[2], 0))
    assert "beta" in (results[4].failure or "")


def test_parts_that_fit_the_memory_have_the_same_numbers(engine: fb.Fused, results: list[fb.Result]) -> None:
    """No two runs fit into a part of no memory."""
    for one, other in zip(many(engine, METHOD, STEPS[:2], memory_limit=0), results, strict=False):
        agree(one, other)


def test_two_devices_have_the_numbers_of_one(results: list[fb.Result]) -> None:
    """Over two devices the runs of each seed are spread, and with one run for each seed the seeds."""
    script = (
        "import json, jax, test_many as t, fedbilevel as fb\n"
        "task = t.Quadratic(size_x=3, size_y=4, noise=1.0).make(clients=6, seed=0)\n"
        "engine = fb.Fused(task.problem, task.clients)\n"
        "for steps in (t.STEPS[:2], t.STEPS[:1]):\n"
        "    found = t.many(engine, t.METHOD, steps)\n"
        "    print(json.dumps([jax.device_count(), [[r.x.tolist(), r.y.tolist()] for r in found]]))\n"
    )
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    environment = {**os.environ, "XLA_FLAGS": flags}
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script], env=environment, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    for (devices, found), count in zip(map(json.loads, done.stdout.splitlines()), (4, 2), strict=True):
        assert (devices, len(found)) == (2, count)
        for (x, y), result in zip(found, results, strict=False):
            np.testing.assert_allclose(x, result.x, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(y, result.y, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cohort", ["phase", "round"])
def test_cohorts_of_a_phase_and_of_a_round_are_those_of_single_runs(engine: fb.Fused, cohort: str) -> None:
    """The summed estimator does the same for every Q, so no instruction is left out for any seed."""
    method = dataclasses.replace(METHOD, estimator="summed")
    rules = {"cohort": cohort, "weighting": "samples"}
    found = many(engine, method, STEPS[:2], federation=rules)
    agree(found[3], alone(engine, method, STEPS[1], 3, federation=rules))


def test_iterations_of_different_lengths_keep_to_the_budget(engine: fb.Fused) -> None:
    method = fb.FedNest(N=1, T=3, alpha=0.1, beta=0.1, lam=0.3, participation=3, stop_early=True)
    found = many(engine, method, [{"lam": 0.2}, {"lam": 0.4}], stop={"rounds": 40})
    agree(found[1], alone(engine, method, {"lam": 0.2}, 3, stop={"rounds": 40}))
    agree(found[2], alone(engine, method, {"lam": 0.4}, 0, stop={"rounds": 40}))


def test_an_optimiser_of_the_server_and_momenta_are_values_of_one_program(engine: fb.Fused) -> None:
    base = fb.AggITD(
        N=1, beta=0.1, lam=0.3, participation=1.0, upper={"name": "adam", "learning_rate": 0.05}, momentum_y=0.3
    )
    settings = [{"upper.learning_rate": 0.1, "momentum_y": 0.5}, {"upper.learning_rate": 0.02}]
    before = len(engine.programs)
    found = many(engine, base, settings, seeds=[1])
    assert len(engine.programs) == before + 1
    for own, result in zip(settings, found, strict=True):
        agree(result, alone(engine, base, own, 1))


def test_the_same_grid_with_other_values_compiles_nothing(
    engine: fb.Fused, compilations: Callable[[], AbstractContextManager[list[str]]]
) -> None:
    method = fb.FedSOBA(participation=1.0)
    many(engine, method, [{"alpha": 0.01}, {"alpha": 0.02}])
    with compilations() as seen:
        many(engine, method, [{"alpha": 0.03}, {"alpha": 0.05}])
    assert seen == []


def test_runs_that_differ_in_structure_are_in_programs_of_their_own(
    engine: fb.Fused, caplog: pytest.LogCaptureFixture
) -> None:
    """N is a whole number, and the participation a number that the method looks at."""
    method = fb.NaiveITD(N=1, alpha=0.1, beta=0.1, lam=0.3, participation=1.0)
    settings: list[dict[str, Any]] = [
        {"N": 2},
        {"participation": 0.5, "beta": 0.2},
        {"participation": 0.5, "beta": 0.3},
    ]
    with caplog.at_level(logging.INFO, "fedbilevel"):
        found = many(engine, method, settings, seeds=[0])
    agree(found[0], alone(engine, method, settings[0], 0))
    agree(found[2], alone(engine, method, settings[2], 0))
    assert "3 runs are in 2 programs" in caplog.text


def test_folders_are_those_of_single_runs_and_can_be_continued(engine: fb.Fused, tmp_path: Path) -> None:
    """The first part of a longer run serves as the shorter one, and the history is that of an unbroken run."""
    method = dataclasses.replace(METHOD, estimator="summed")
    rules = {"every": 4, "checkpoint_every": 2}
    many(engine, method, STEPS[:2], stop={"iterations": 3}, evaluate=rules, out=tmp_path)
    found = many(engine, method, STEPS[:2], evaluate=rules, out=tmp_path, resume=True)
    single: dict[str, Any] = dict(evaluate=rules, out=tmp_path / "alone")
    alone(engine, method, STEPS[0], 3, stop={"iterations": 3}, **single)
    agree(found[1], alone(engine, method, STEPS[0], 3, resume=True, **single))
    saved = fb.load_run(tmp_path / "000-seed-3")
    np.testing.assert_allclose(saved.y, found[1].y)
    assert saved.summary["rounds"] == found[1].summary["rounds"]
    assert found[1].folder == tmp_path / "000-seed-3"


def test_runs_with_a_rule_that_can_be_traced_are_in_one_program(engine: fb.Fused) -> None:
    robust: dict[str, Any] = dict(federation={"aggregator": "trimmed-mean"})
    method = dataclasses.replace(METHOD, estimator="summed")
    found = many(engine, method, STEPS[:2], seeds=[3], **robust)
    agree(found[1], alone(engine, method, STEPS[1], 3, **robust))
    assert engine.programs
    plain = many(engine, method, STEPS[1:2], seeds=[3])
    assert float(np.linalg.norm(found[1].y - plain[0].y)) > 1e-3, "the rule is used"


def test_a_setting_that_is_wrong_is_named(engine: fb.Fused) -> None:
    for own, named in (
        ({"alpha": -1.0}, r"settings\[1\] = .*alpha = -1\.0 is wrong"),
        ({"betta": 0.1}, r"settings\[1\] = .*betta is not a setting; did you mean beta\?"),
        ({"beta": "auto"}, r"settings\[1\] = .*algorithm.beta = 'auto' is wrong"),
    ):
        with pytest.raises(fb.SettingsError, match=named):
            many(engine, METHOD, [{}, own])


def test_what_needs_the_host_is_run_alone_with_a_word_unless_fused_is_asked_for(
    task: QuadraticTask, caplog: pytest.LogCaptureFixture
) -> None:
    options: dict[str, Any] = dict(
        federation={"aggregator": "geometric-median"}, stop={"iterations": 1}, seeds=[2]
    )
    found = fb.train_many(task.problem, task.clients, METHOD, settings=STEPS[:1], **options)
    method = dataclasses.replace(METHOD, **STEPS[0])
    single = fb.train(
        task.problem, task.clients, method, federation=options["federation"], stop={"iterations": 1}, seed=2
    )
    agree(found[0], single)
    assert "1 runs are run one after the other" in caplog.text
    assert "federation.aggregator = 'geometric-median'" in caplog.text
    with pytest.raises(fb.SettingsError, match=r"federation\.aggregator = 'geometric-median'"):
        fb.train_many(task.problem, task.clients, METHOD, settings=STEPS[:1], engine="fused", **options)
