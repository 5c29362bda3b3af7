"""A local lower level: every client has its own y, and only x and vectors like it are sent.

On the quadratic, y_i*(x) = -A_i^{-1} (B_i x + b_i), and the hypergradient is the mean over clients of
f_x,i - B_iᵀ A_i^{-1} f_y,i, so the stationary point solves one linear system, in float64.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS, FedBiOAccLocal, LocalLower, lower_kinds
from fedbilevel.problems import QuadraticTask
from wires import in_process_sites

P, Q, CLIENTS = 4, 3, 5
KEPT = LocalLower(participation=1.0, alpha=0.5, beta=1.0, tau=3)
ANEW = LocalLower(participation=1.0, alpha=0.5, beta=1.0, tau=120, solve="anew", products=Q)
STORM = FedBiOAccLocal(participation=1.0, alpha=0.3, beta=1.0, tau=2, c=0.0)


@cache
def task(kind: Any = "local") -> QuadraticTask:
    return fb.Quadratic(size_x=P, size_y=Q, condition=5, lower_is=kind).make(CLIENTS, 0)


@cache
def engine() -> fb.Simulation:
    """One engine for all runs here, so that a step is compiled once."""
    return fb.Simulation(task().problem, task().clients, devices=1)


def trained(method: Any, iterations: int, **more: Any) -> fb.Result:
    given: dict[str, Any] = {"stop": {"iterations": iterations}, "evaluate": {"every": iterations}, **more}
    given.setdefault("engine", engine())
    return fb.train(task().problem, task().clients, method, measure=task().measure, **given)


def test_the_closed_form_is_the_gradient_of_the_problem() -> None:
    t, x, small = task(), np.linspace(-1, 1, P), 1e-5

    def value(x: np.ndarray) -> float:
        z = [np.concatenate([x, y]) for y in t.solution(x)]
        J, c = t.J.astype(np.float64), t.c.astype(np.float64).mean(1)
        return float(np.mean([0.5 * a @ b @ a + a @ d for a, b, d in zip(z, J, c, strict=True)]))

    slope = [(value(x + small * e) - value(x - small * e)) / (2 * small) for e in np.eye(P)]
    np.testing.assert_allclose(t.hypergradient(x), slope, rtol=1e-6, atol=1e-8)
    assert np.linalg.norm(t.hypergradient(t.stationary_point)) < 1e-12


@pytest.mark.parametrize(
    ("method", "iterations", "rounds"),
    [(KEPT, 100, 1), (ANEW, 60, 1), (STORM, 100, 2)],
    ids=("kept", "anew", "storm"),
)
def test_a_method_reaches_the_closed_form_and_sends_no_y(method: Any, iterations: int, rounds: int) -> None:
    result = trained(method, iterations)
    np.testing.assert_allclose(result.x, task().stationary_point, rtol=0, atol=1e-4)
    assert result.history[-1]["hypergradient_norm"] < 1e-4
    sent = 4 * CLIENTS * P * rounds * iterations
    last = result.history[-1]
    assert (last["rounds"], last["bytes_up"], last["bytes_down"]) == (rounds * iterations, sent, sent)
    np.testing.assert_array_equal(result.y, task().problem.y)  # where new clients start
    if result.lower is None:
        assert method is ANEW  # which keeps nothing
    else:
        own = np.stack([result.lower[i] for i in range(CLIENTS)])
        np.testing.assert_allclose(own, task().solution(result.x), rtol=0, atol=1e-4)


def test_a_global_method_on_the_same_data_ends_elsewhere() -> None:
    shared = task("global")
    soba = fb.FedSOBA(participation=1.0, alpha=0.3, beta=0.5)
    result = fb.train(shared.problem, shared.clients, soba, stop={"iterations": 400}, engine="fused")
    np.testing.assert_allclose(result.x, shared.stationary_point, rtol=0, atol=1e-4)
    assert np.linalg.norm(np.asarray(result.x) - task().stationary_point) > 0.1
    assert np.linalg.norm(task().hypergradient(result.x)) > 0.1


def test_the_drift_of_fedbioacc_local_is_of_the_order_of_what_is_forgotten() -> None:
    ends = []
    for c in (0.01, 0.02):
        result = trained(dataclasses.replace(STORM, c=c, tau=3), 100)
        ends.append(result.history[-1]["hypergradient_norm"])
    assert ends[0] > 1e-3 and ends[1] / ends[0] == pytest.approx(2.0, rel=0.1)


def test_without_the_implicit_part_it_is_fedreps_alternation() -> None:
    """With v = 0 the fixed point has mean_i f_x,i(x, y_i*(x)) = 0, and not the hypergradient."""
    x = np.asarray(trained(dataclasses.replace(KEPT, implicit=False), 150).x)
    t = task()
    z = np.concatenate([np.tile(x, (CLIENTS, 1)), t.solution(x)], 1)
    direct = (np.einsum("ijk,ik->ij", t.J, z) + t.c.mean(1))[:, :P].mean(0)
    assert np.linalg.norm(direct) < 1e-4 < 0.05 < np.linalg.norm(t.hypergradient(x))


def test_upper_steps_and_optimisers_work_as_in_other_methods() -> None:
    several = dataclasses.replace(KEPT, upper_steps=3, alpha=0.05)
    ends = [
        trained(each, 200).history[-1]["hypergradient_norm"]
        for each in (several, dataclasses.replace(KEPT, upper={"name": "sgd", "learning_rate": 0.5}))
    ]
    assert 1e-4 < ends[0] < 0.2 and ends[1] < 1e-4  # several upper steps drift


@pytest.mark.parametrize("name", [n for n in ALGORITHMS if "local" not in lower_kinds(ALGORITHMS[n])])
def test_a_method_for_a_shared_y_is_refused_by_name(name: str) -> None:
    whole = {"participation": 1.0} if hasattr(ALGORITHMS[name], "participation") else {}
    with pytest.raises(fb.SettingsError, match=f"'{name}' is wrong: every client.*use local-lower, fed"):
        trained(ALGORITHMS[name](**whole), 1)


def test_a_method_for_own_y_is_refused_where_y_is_shared() -> None:
    shared = task("global")
    for method in (KEPT, STORM):
        with pytest.raises(fb.SettingsError, match=r"lower_is = 'global'.*use fbo-aggitd"):
            fb.train(shared.problem, shared.clients, method, stop={"rounds": 2})
        with pytest.raises(fb.SettingsError, match=r"lower_is = 'global'.*use fbo-aggitd"):
            fb.train_many(shared.problem, shared.clients, method, stop={"rounds": 2})


def test_many_runs_at_once_are_those_of_one_by_one() -> None:
    t, more = task(), {"stop": {"iterations": 3}, "evaluate": {"every": 3}}
    many = fb.train_many(t.problem, t.clients, ANEW, settings=[{"alpha": 0.5}, {"alpha": 0.1}], **more)  # type: ignore[arg-type]
    alone = trained(ANEW, 3)
    np.testing.assert_allclose(many[0].x, alone.x, rtol=0, atol=1e-6)
    assert many[0].history[-1]["upper_loss"] == pytest.approx(alone.history[-1]["upper_loss"], rel=1e-5)
    kept = fb.train_many(t.problem, t.clients, KEPT, **more)  # type: ignore[arg-type]
    np.testing.assert_allclose(kept[0].x, trained(KEPT, 3).x, rtol=0, atol=1e-6)


def test_the_fused_engine_refuses_clients_that_keep_and_carries_those_that_do_not() -> None:
    with pytest.raises(fb.SettingsError, match="clients keep a state of their own"):
        trained(KEPT, 1, engine="fused")
    apart = trained(ANEW, 5)
    fused = trained(ANEW, 5, engine="fused")
    np.testing.assert_allclose(fused.x, apart.x, rtol=0, atol=1e-6)
    assert fused.history[-1]["upper_loss"] == pytest.approx(apart.history[-1]["upper_loss"], rel=1e-5)


def test_what_does_not_go_with_a_local_lower_level_is_refused() -> None:
    problem = task().problem
    with pytest.raises(fb.SettingsError, match="lower_is = 'each' is wrong"):
        dataclasses.replace(problem, lower_is="each")  # type: ignore[arg-type]
    with pytest.raises(fb.SettingsError, match="feasible_y is wrong with lower_is = 'local'"):
        dataclasses.replace(problem, feasible_y=fb.Box(low=0.0))
    with pytest.raises(fb.SettingsError, match="test is wrong with lower_is = 'local'"):
        trained(KEPT, 1, test=task().clients.load(0).upper)
    with pytest.raises(fb.SettingsError, match="a diagnosis is of a lower level that clients share"):
        fb.diagnose(problem, task().clients, KEPT)
    with pytest.raises(fb.SettingsError, match=r"algorithm\.tau has 2 numbers for 5 clients"):
        trained(dataclasses.replace(KEPT, tau=(1, 2)), 1)


def test_a_run_that_is_interrupted_goes_on_with_the_y_of_its_clients(tmp_path: Path) -> None:
    half = dataclasses.replace(STORM, participation=2)
    rules = {"every": 2, "checkpoint_every": 2}
    whole = trained(half, 6, evaluate=rules)

    def killed(progress: fb.Progress) -> None:
        if progress.iteration == 5:  # after the checkpoint of iteration 4, clients have kept newer states
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        trained(half, 6, evaluate=rules, out=tmp_path / "run", observers=[killed])
    resumed = trained(half, 6, evaluate=rules, out=tmp_path / "run", resume=True)
    np.testing.assert_array_equal(resumed.x, whole.x)
    saved = fb.load_run(tmp_path / "run", problem=task().problem)
    assert whole.lower is not None and saved.lower.keys() == whole.lower.keys()
    for client, y in whole.lower.items():
        np.testing.assert_array_equal(saved.lower[client], y)


# A small regression in which every client has its own slope: y_i, and x scales the shared feature.
def regression(clients: int = 4) -> tuple[fb.Problem, fb.ListedClients]:
    g = np.random.default_rng(0)

    def rows(slope: float, count: int) -> Any:
        a = g.normal(size=(count, 1)).astype(np.float32)
        return a, (slope * a[:, 0]).astype(np.float32)

    def error(x: Any, y: Any, b: fb.Batch) -> Any:
        return b.mean((b.features[:, 0] * y - b.targets) ** 2)

    problem = fb.Problem(
        x=jnp.full(1, 0.5),
        y=jnp.zeros(()),
        embed=lambda x, inputs: inputs * x,
        lower=lambda x, y, b: error(x, y, b) + 0.1 * y**2,
        upper=error,
        metrics=lambda x, y, b: {"test_error": error(x, y, b)},
        lower_is="local",
    )
    return problem, fb.clients_from([(rows(i, 6), rows(i, 5), rows(i, 2 + i)) for i in range(clients)])


PERSONAL = LocalLower(participation=0.5, alpha=0.05, beta=0.2, tau=4)


def test_every_client_measures_at_its_own_y_on_its_own_test_rows_on_every_engine() -> None:
    problem, clients = regression()
    found = {}
    engines: dict[str, Any] = {"loop": fb.Loop, "simulation": fb.Simulation, "flare": in_process_sites}
    for name, make in engines.items():
        made = make(problem, clients)
        result = fb.train(problem, clients, PERSONAL, stop={"rounds": 3}, engine=made)
        if name == "loop":
            x, lower = float(result.x[0]), dict(result.lower or {})
        made.close()
        found[name] = result.history[-1]
    # By hand: the steps of a round from the kept y at the last x, and the errors on the test rows.
    errors = []
    for i in range(clients.count):
        a, t = clients.load(i).lower
        y = float(lower[i]) if i in lower else 0.0
        for _ in range(PERSONAL.tau):  # type: ignore[arg-type]
            y -= PERSONAL.beta * (np.mean(2 * (x * a[:, 0] * y - t) * x * a[:, 0]) + 0.2 * y)
        a, t = clients.load(i).test  # type: ignore[misc]
        errors.append(np.mean((x * a[:, 0] * y - t) ** 2))
    expected = [np.mean(errors), max(errors), np.std(errors)]
    for record in found.values():
        got = [record[name] for name in ("test_error", "worst_test_error", "spread_test_error")]
        np.testing.assert_allclose(got, expected, rtol=1e-4)


def test_a_client_that_joins_later_solves_its_own_y_at_the_trained_x(tmp_path: Path) -> None:
    problem, clients = regression()
    method = dataclasses.replace(PERSONAL, solve="anew")
    result = fb.train(problem, clients, method, stop={"rounds": 3}, out=tmp_path / "run")
    a = np.linspace(-1, 1, 7, dtype=np.float32)[:, None]
    rows = (a, 2.5 * a[:, 0])
    u = float(result.x[0]) * a[:, 0].astype(np.float64)
    solved = (u @ rows[1]) / (u @ u + 0.1 * len(u))
    joined = result.join(rows, rows, steps=400)
    assert float(joined.y) == pytest.approx(solved, rel=1e-4)
    assert joined.metrics["test_error"] == pytest.approx(np.mean((u * solved - rows[1]) ** 2), rel=1e-3)
    again = fb.load_run(tmp_path / "run", problem=problem).join(rows, rows, steps=400)
    assert float(again.y) == float(joined.y) and again.metrics == joined.metrics
    with pytest.raises(fb.SettingsError, match="no problem is here"):
        dataclasses.replace(result, joining=None).join(rows)


def test_clients_have_test_rows_all_or_none() -> None:
    _, clients = regression(2)
    mixed = [clients.data[0], clients.data[1]._replace(test=None)]
    with pytest.raises(fb.SettingsError, match="client 1 has the parts lower, upper, and client 0 has"):
        fb.ListedClients(mixed)
    with pytest.raises(fb.SettingsError, match="client 0 has no test rows"):
        fb.LazyClients(1, fb.ClientSize(6, 6), lambda i: mixed[1], test_rows=3).load(0)


def test_a_shared_y_is_measured_on_the_test_rows_of_clients_too() -> None:
    problem, clients = regression()
    shared = dataclasses.replace(problem, lower_is="global")
    result = fb.train(shared, clients, fb.FedSOBA(participation=1.0), stop={"rounds": 2})
    x, y = jnp.asarray(result.x), jnp.reshape(result.y, 1)
    tests = [data.test for data in clients.data]
    errors = np.asarray([shared.measure(x, y, test)["test_error"] for test in tests if test is not None])
    got = [result.history[-1][name] for name in ("test_error", "worst_test_error", "spread_test_error")]
    np.testing.assert_allclose(got, [errors.mean(), errors.max(), errors.std()], rtol=1e-5)
