"""The advisor: curvature by rounds, the true hypergradient, a diagnosis, and settings that are "auto"."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from commands import QUADRATIC, Command, one_line, sets
from fedbilevel.advisor import Automatics, notes_on
from fedbilevel.advisor._lanczos import Krylov, Spectrum, lanczos
from fedbilevel.advisor._newton import improved, learn
from fedbilevel.advisor._notes import implicit_share
from fedbilevel.advisor._steps import Point
from fedbilevel.advisor._truth import true_hypergradient
from fedbilevel.advisor._upper import adapted
from fedbilevel.advisor._values import _largest
from fedbilevel.algorithms.secants import no_pairs, quasi_newton, with_pair
from fedbilevel.feasible import region
from fedbilevel.federation import Series
from fedbilevel.problems.quadratic import QuadraticTask
from fedbilevel.settings import from_mapping, to_mapping

P, Q, CLIENTS = 3, 6, 3
FAST: dict[str, Any] = dict(participation=1.0, lower_solver="sgd", lower_steps=1, batch_zeta_local="full")
ALL: dict[str, Any] = dict(alpha="auto", beta="auto", lam="auto", N="auto", estimator="summed", **FAST)


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    return fb.Quadratic(size_x=P, size_y=Q, condition=20.0, heterogeneity=1.0).make(CLIENTS, seed=3)


@pytest.fixture(scope="module")
def engine(task: QuadraticTask) -> fb.Simulation:
    return fb.Simulation(task.problem, task.clients)


@pytest.fixture
def point(task: QuadraticTask, engine: fb.Simulation) -> Point:
    x, y = jnp.linspace(-1.0, 1.0, P), jnp.linspace(1.0, 2.0, Q)
    return Point(fb.Federation(engine), x, y, by_rounds=True)


@pytest.fixture(scope="module")
def found(task: QuadraticTask, engine: fb.Simulation) -> fb.Diagnosis:
    method = fb.AggITD(N=4, lam=0.3, beta=0.5, alpha=0.1, estimator="summed", **FAST)
    return fb.diagnose(task.problem, task.clients, method, engine=engine, draws=2)


def hessian(task: QuadraticTask) -> np.ndarray:
    return np.asarray(task.A.astype(np.float64).mean(0))


# Curvature ----------------------------------------------------------------------------------------------


def test_lanczos_finds_both_ends_of_the_spectrum_by_one_round_a_product(task: QuadraticTask, point: Point) -> None:
    spectrum = lanczos(point, np.ones(Q), most=Q, tolerance=1e-9, seed=0).spectrum
    values = np.linalg.eigvalsh(hessian(task))
    assert (spectrum.mu, spectrum.L_g) == pytest.approx((values[0], values[-1]), rel=1e-3)
    assert spectrum.exact
    ledger = point.fed.ledger
    assert {name: each.rounds for name, each in ledger.steps.items()} == {"lanczos_products": Q}
    # x and y are sent once, and two vectors in each direction are in every round
    assert ledger.bytes_down == 4 * CLIENTS * (P + Q + 2 * Q * Q)
    assert ledger.bytes_up == 4 * CLIENTS * 2 * Q * Q


def test_ritz_values_are_within_their_errors_of_eigenvalues() -> None:
    g = np.random.default_rng(0)
    basis = np.linalg.qr(g.normal(size=(40, 40)))[0]
    eigenvalues = np.geomspace(0.01, 1.0, 40)
    run = Krylov(g.normal(size=40))
    for _ in range(12):
        run.add(basis @ (eigenvalues * (basis.T @ run.next)))
    values, weights, errors = run.ritz()
    apart = np.abs(values[:, None] - eigenvalues).min(1)
    assert np.all(apart <= errors + 1e-12) and errors[-1] < 0.05
    assert weights.sum() == pytest.approx(1.0)
    assert np.all(np.diff(values) > 0) and values[-1] <= 1.0 + 1e-12 and values[0] >= 0.01 - 1e-12


def test_the_bias_of_every_series_is_that_of_the_dense_sum(task: QuadraticTask, point: Point) -> None:
    H, r = hessian(task), np.linspace(1.0, -1.0, Q)
    spectrum = lanczos(point, r, most=Q, tolerance=1e-9, seed=0).spectrum
    p = np.linalg.solve(H, r)
    for lam, terms in ((0.2, 1), (0.2, 7), (1.0, 12)):
        power = [np.linalg.matrix_power(np.eye(Q) - lam * H, k) for k in range(terms)]
        dense = np.linalg.norm(lam * sum(power) @ r - p) / np.linalg.norm(p)
        assert spectrum.bias(lam, terms) == pytest.approx(dense, rel=2e-3)
        assert spectrum.tail(lam, terms) >= dense * (1 - 1e-3)
    n = spectrum.terms_for(1.0, 0.05, 1000)
    assert spectrum.bias(1.0, n) <= 0.05 < spectrum.bias(1.0, n - 1)


def test_the_largest_curvature_of_a_client_takes_one_round(task: QuadraticTask, point: Point) -> None:
    largest = np.linalg.norm(task.A, 2, axis=(1, 2)).max()
    mean = np.linalg.eigvalsh(hessian(task))
    measured = _largest(point, Spectrum.between(float(mean[0]), float(mean[-1])), None, seed=0)
    assert largest * 0.97 <= measured <= largest * CLIENTS ** (1 / 16) * 1.01
    assert point.fed.ledger.rounds == 1


# The hypergradient --------------------------------------------------------------------------------------


@pytest.mark.parametrize("solve", [True, False])
def test_the_true_hypergradient_is_the_closed_form(task: QuadraticTask, point: Point, solve: bool) -> None:
    truth = true_hypergradient(point, solve=solve, tolerance=1e-6, most=Q, seed=0)
    wanted = task.hypergradient(point.x, None if solve else point.y)
    np.testing.assert_allclose(truth.h, wanted, rtol=1e-4, atol=1e-5)
    assert truth.solved is solve
    np.testing.assert_allclose(truth.direct + truth.implicit, truth.h)


def test_a_diagnosis_compares_the_estimate_with_the_closed_form(task: QuadraticTask, found: fb.Diagnosis) -> None:
    x = np.zeros(P)
    y = task.solution(x)
    np.testing.assert_allclose(found.hypergradient, task.hypergradient(x), rtol=1e-4, atol=1e-5)
    H, B, J = hessian(task), task.B.astype(np.float64).mean(0), task.J.astype(np.float64).mean(0)
    gradient = J @ np.concatenate([x, y]) + task.c.astype(np.float64).mean((0, 1))
    series = 0.3 * sum(np.linalg.matrix_power(np.eye(Q) - 0.3 * H, k) for k in range(5))  # N + 1 terms
    estimate = gradient[:P] - B.T @ series @ gradient[P:]
    np.testing.assert_allclose(found.estimate, estimate, rtol=1e-3, atol=1e-4)
    implicit = found.hypergradient - gradient[:P]
    share = (estimate - gradient[:P]) @ implicit / (implicit @ implicit)
    assert found.implicit_share == pytest.approx(share, rel=1e-2)
    assert found.bias == pytest.approx(
        np.linalg.norm(estimate - found.hypergradient) / np.linalg.norm(found.hypergradient), rel=1e-2
    )
    assert found.deviation == pytest.approx(0.0, abs=1e-5)  # the summed estimator on full batches draws nothing


def test_a_diagnosis_recommends_values_and_says_why(task: QuadraticTask, found: fb.Diagnosis) -> None:
    L = float(np.linalg.eigvalsh(hessian(task))[-1])
    values = found.recommended
    assert {"alpha", "beta", "lam", "N"} <= values.keys()
    assert values["lam"] == pytest.approx(1 / L, rel=0.02) and values["beta"] == pytest.approx(1 / L, rel=0.02)
    assert found.spectrum.bias(values["lam"], int(values["N"]) + 1) <= 0.1
    assert all(each.why for each in found.advice)
    text = str(found)
    assert "implicit share" in text and "algorithm.lam" in text and "0.3 →" in text


def test_a_diagnosis_of_agents_costs_no_rounds_of_a_server(task: QuadraticTask) -> None:
    loop = fb.Loop(task.problem, task.clients)
    agents = fb.diagnose(task.problem, task.clients, fb.MADSBO(T=2, N=2), engine=loop, draws=1)
    assert agents.rounds == 2 + 2 - 1 and not agents.solved  # the exchanges of one outer iteration
    np.testing.assert_allclose(
        agents.hypergradient, task.hypergradient(np.zeros(P), np.zeros(Q)), rtol=1e-3, atol=1e-4
    )
    assert agents.client_L is not None and agents.recommended["gamma"] <= 1 / agents.client_L


# The upper step size ------------------------------------------------------------------------------------


def test_secants_find_a_step_that_is_faster_than_the_best_fixed_one() -> None:
    A, b = np.diag(np.geomspace(0.01, 1.0, 10)), np.ones(10)

    def iterations(adaptive: bool) -> int:
        x, alpha, memory = np.zeros(10), 0.001 if adaptive else 1.0, dict[str, np.ndarray]()
        for k in range(2000):
            h = A @ x - b
            if np.linalg.norm(h) < 1e-2:
                return k
            before, x = x, x - alpha * h
            alpha = adapted(memory, alpha, before, h, 1.0) if adaptive else alpha
        return 2000

    assert iterations(adaptive=True) < iterations(adaptive=False) < 2000


# Settings that are "auto" ---------------------------------------------------------------------------------


def test_auto_in_a_spec_is_written_back_as_auto_and_changes_the_digest() -> None:
    spec = fb.load_spec("demo", ["algorithm.beta=auto", "algorithm.N=auto"])
    assert spec.to_mapping()["algorithm"]["beta"] == "auto" and 'N = "auto"' in spec.to_toml()
    assert spec.digest != fb.load_spec("demo").digest
    method = fb.AggITD(beta=fb.AUTO, N="auto")  # type: ignore[arg-type]
    assert from_mapping(fb.AggITD, to_mapping(method), "algorithm") == method
    assert repr(fb.AUTO) == f"{fb.AUTO:.3g}" == "auto" and np.isnan(2.0 * fb.AUTO)


def train(task: QuadraticTask, **settings: Any) -> fb.Result:
    how: dict[str, Any] = dict(measure=task.measure, evaluate={"checkpoint_every": 2})
    how |= {name: settings.pop(name) for name in ("stop", "out", "resume", "privacy") if name in settings}
    return fb.train(task.problem, task.clients, fb.AggITD(**(ALL | settings)), **how)


@pytest.mark.slow
def test_an_automatic_run_resumes_bit_for_bit_and_measures_once(task: QuadraticTask, tmp_path: Path) -> None:
    whole = train(task, stop={"iterations": 12}, out=tmp_path / "whole")
    train(task, stop={"iterations": 5}, out=tmp_path / "parts")
    parts = train(task, stop={"iterations": 12}, out=tmp_path / "parts", resume=True)
    steps = whole.summary["steps"]
    assert steps == parts.summary["steps"]
    timeless = [[{k: v for k, v in r.items() if k != "seconds"} for r in run.history] for run in (whole, parts)]
    assert timeless[0] == timeless[1]
    np.testing.assert_array_equal(whole.x, parts.x)
    ledger = whole.summary["ledger"]
    assert {"start_gradients", "lanczos_products", "mixed_product"} <= ledger.keys()
    assert sum(each["rounds"] for each in ledger.values()) == whole.summary["rounds"] > steps["rounds"] > Q
    written = json.loads((tmp_path / "whole" / "summary.json").read_text())["steps"]
    assert written["values"].keys() == {"alpha", "beta", "lam", "N"}
    assert 'beta = "auto"' in (tmp_path / "whole" / "spec.toml").read_text()
    first, last = whole.history[0]["hypergradient_norm"], whole.history[-1]["hypergradient_norm"]
    assert last < 0.1 * first


@pytest.mark.parametrize("settings", [{}, {"estimator": "cg", "lam": 0.01, "memory": "auto"}])
def test_a_step_is_made_smaller_when_the_curvature_grows(settings: dict[str, Any]) -> None:
    """The lower loss has the curvature 1 + exp(4x), and the upper loss draws x from 0 towards 1."""
    problem = fb.Problem(
        x=jnp.zeros(1),
        y=jnp.ones(2),
        lower=lambda x, y, b: b.mean(0.5 * (y[0] ** 2 + jnp.exp(4 * x[0]) * (y[1] - 0.1 * b.inputs) ** 2)),
        upper=lambda x, y, b: b.mean((x[0] - 1 + 0 * b.inputs) ** 2 + 0.01 * jnp.sum(y**2)),
    )
    clients = fb.clients_from([((np.ones(4), np.ones(4)), (np.ones(4), np.ones(4)))] * 2)
    method = fb.AggITD(**ALL | settings)
    result = fb.train(problem, clients, method, stop={"iterations": 15})
    steps = result.summary["steps"]
    assert result.x[0] > 0.9
    assert (
        steps["values"]["beta"] * np.exp(4 * float(result.x[0])) < 1.2
    )  # it began with 0.99 and a curvature of 1
    assert "restarts" not in result.summary and any(change[1] == "beta" for change in steps["changes"])


# Quasi-Newton steps ---------------------------------------------------------------------------------------


def pairs_of(H: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    pairs = no_pairs(len(vectors), len(H))
    for v in vectors:
        pairs = with_pair(pairs, v, H @ v)
    return pairs


def test_pairs_give_the_dense_update_of_the_inverse(task: QuadraticTask) -> None:
    H, g = hessian(task), np.random.default_rng(0)
    vectors, wanted = g.normal(size=(4, Q)), 0.3 * np.eye(Q)
    for v in vectors:
        w, rho = H @ v, 1 / (v @ H @ v)
        left = np.eye(Q) - rho * np.outer(v, w)
        wanted = left @ wanted @ left.T + rho * np.outer(v, v)
    r = g.normal(size=Q)
    np.testing.assert_allclose(quasi_newton(pairs_of(H, vectors), r, 0.3), wanted @ r, rtol=1e-4)
    conjugate = np.linalg.eigh(H)[1].T  # the pairs of conjugate directions do not disturb each other
    np.testing.assert_allclose(quasi_newton(pairs_of(H, conjugate), r, 0.3), np.linalg.solve(H, r), rtol=1e-4)
    flat = with_pair(pairs_of(H, vectors), r, -r)  # a direction without positive curvature is no pair
    np.testing.assert_array_equal(flat, pairs_of(H, vectors))


def test_a_measurement_gives_pairs_that_solve_the_system(task: QuadraticTask, point: Point) -> None:
    r = np.linspace(1.0, -1.0, Q)
    run, H, pairs = lanczos(point, r, most=4, tolerance=1e-9, seed=0), hessian(task), no_pairs(6, Q)
    for v, w in run.solving.pairs():
        np.testing.assert_allclose(w, H @ v, atol=1e-5)
        pairs = with_pair(pairs, v, w)
    np.testing.assert_allclose(quasi_newton(pairs, r, 1.0), run.solution(), rtol=0.1, atol=0.02)


@pytest.mark.parametrize("bound", [None, fb.Box(-0.5, 1.0), fb.Simplex()])
def test_quasi_newton_steps_end_at_the_minimum_and_stay_in_the_set(bound: Any) -> None:
    """F has curvatures from 0.01 to 10; the minimum in a set is found by many projected gradient steps."""
    g = np.random.default_rng(1)
    basis = np.linalg.qr(g.normal(size=(8, 8)))[0]
    A, b = (basis * np.geomspace(0.01, 10.0, 8)) @ basis.T, g.normal(size=8)
    within = region(bound, lambda v: v)

    def nearest(v: np.ndarray) -> np.ndarray:
        return np.asarray(within.nearest(jnp.asarray(v, jnp.float32)), np.float64)

    x, alpha = nearest(np.full(8, 0.1)), 1e-3
    wanted, memory = np.linalg.solve(A, b), dict[str, np.ndarray]()
    if bound is not None:
        wanted = x
        for _ in range(500 if isinstance(bound, fb.Box) else 300):
            wanted = nearest(wanted - (A @ wanted - b) / 10.0)
    for _ in range(40):
        h = A @ x - b
        if memory:
            learn(memory, alpha, x, h)
        first = not memory
        alpha = adapted(memory, alpha, x, h, 1.0)
        x = nearest(x - alpha * h) if first else np.asarray(improved(memory, alpha, x, h, within), np.float64)
        np.testing.assert_allclose(x, nearest(x), atol=1e-6)
    value = [0.5 * v @ A @ v - b @ v for v in (x, wanted)]
    assert value[0] <= value[1] + 1e-4 * abs(value[1])


def test_a_set_that_does_not_know_its_tangent_has_gradient_steps() -> None:
    within = region(fb.Ball(radius=2.0), lambda v: v)
    memory = {"x": np.zeros(2, np.float32), "h": np.ones(2, np.float32)}
    x, h = np.asarray([1.0, 0.5]), np.asarray([-3.0, 1.0])
    learn(memory, 0.5, x, h)
    np.testing.assert_allclose(
        improved(memory, 0.5, x, h, within), within.nearest(jnp.asarray(x - 0.5 * h, jnp.float32))
    )


def remembering(task: QuadraticTask, **settings: Any) -> fb.Result:
    return train(task, **{"estimator": "cg", "lam": 0.01, "memory": "auto"} | settings)


@pytest.mark.slow
def test_a_run_with_a_memory_resumes_bit_for_bit(task: QuadraticTask, tmp_path: Path) -> None:
    whole = remembering(task, stop={"iterations": 7})
    remembering(task, stop={"iterations": 3}, out=tmp_path / "parts")
    parts = remembering(task, stop={"iterations": 7}, out=tmp_path / "parts", resume=True)
    assert whole.summary["steps"] == parts.summary["steps"]
    np.testing.assert_array_equal(whole.x, parts.x)
    np.testing.assert_array_equal(whole.y, parts.y)
    np.testing.assert_allclose(whole.x, task.stationary_point, atol=1e-3)
    plain = remembering(task, memory=0, momentum_y="auto", stop={"rounds": whole.summary["rounds"]})
    assert whole.history[-1]["hypergradient_norm"] < 0.1 * plain.history[-1]["hypergradient_norm"]


def test_pairs_of_another_matrix_are_forgotten(task: QuadraticTask, engine: fb.Simulation) -> None:
    """The server has pairs of a matrix that is fifty times smaller, so that its first step is far too long."""
    fed, x = fb.Federation(engine), jnp.linspace(-1.0, 1.0, P)
    method = fb.AggITD(estimator="cg", cg_tolerance=1e-5, memory=Q, N=10, beta=1.0, participation=1.0)
    state = method.init(task.problem)._replace(x=x, pairs=jnp.asarray(pairs_of(hessian(task) / 50, np.eye(Q))))
    fed.hold(x=x)
    solved = method.newton_steps(fed, state)
    gap = [np.linalg.norm(np.asarray(y) - task.solution(x)) for y in (state.y, solved.y)]
    assert gap[1] < 0.3 * gap[0]
    assert fed.ledger.steps["lower_gradient"].rounds <= 10
    rounds = fed.ledger.rounds
    fed.hold(y=solved.y)
    again, pairs = method.solve(fed, solved.y, jnp.zeros(Q), no_pairs(Q, Q))
    first = fed.ledger.rounds - rounds
    once_more, _ = method.solve(fed, solved.y, jnp.zeros(Q), pairs)  # the preconditioner is almost the inverse
    np.testing.assert_allclose(again, once_more, rtol=1e-2, atol=1e-3)
    assert fed.ledger.rounds - rounds - first <= 3 < first


@pytest.mark.parametrize(
    ("settings", "kept"),
    [({}, 40), ({"batch_u": 4}, 0), ({"participation": 2}, 0), ({"estimator": "summed"}, 0)],
)
def test_a_memory_is_automatic_only_without_noise(
    task: QuadraticTask, engine: fb.Simulation, settings: dict[str, Any], kept: int
) -> None:
    method = fb.AggITD(**dict(FAST, estimator="cg", memory="auto") | settings)
    found = Automatics.of(method)._kept(fb.Federation(engine), method, "memory")
    assert found.recommended == kept and found.why


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(lam=fb.AUTO, estimator="cg"), ("algorithm.lam", "does not use it", "leave it out")),
        (dict(alpha=fb.AUTO, upper={"name": "adam", "learning_rate": 0.1}), ("algorithm.alpha", "learning_rate")),
        (dict(privacy={"mode": "local", "clip": 1.0}), ("privacy.mode = 'local'", "give a number")),
    ],
)
def test_auto_is_refused_where_it_has_no_meaning(
    task: QuadraticTask, settings: dict[str, Any], words: tuple[str, ...]
) -> None:
    with pytest.raises(fb.SettingsError) as caught:
        train(task, stop={"iterations": 1}, **settings)
    assert all(word in str(caught.value) for word in words) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("method", "setting"),
    [(fb.NaiveITD, "lam"), (fb.MADSBO, "alpha"), (fb.Gossip, "L_g"), (fb.AggITD, "participation")],
)
def test_a_setting_that_cannot_be_automatic_says_so_by_name(method: Any, setting: str) -> None:
    with pytest.raises(fb.SettingsError, match=f"{setting} = 'auto' is wrong: .*automatically; give a number"):
        method(**{setting: "auto"})


# Notes while a run goes on --------------------------------------------------------------------------------


@pytest.mark.parametrize("summed", [False, True])
def test_the_vectors_of_a_series_tell_how_much_of_the_implicit_part_is_there(summed: bool) -> None:
    r, a, n = jnp.ones(4), 0.9, 3
    last = sum(a**k for k in range(n + 1)) * r if summed else a**n * r
    share = implicit_share(Series(r, jnp.asarray(last), n, summed), terms=4)
    assert share == pytest.approx(1 - a**4, rel=1e-4)
    told = notes_on(fb.AggITD(N=3, lam=0.1), Series(r, jnp.asarray(last), n, summed))
    assert "34%" in told["missing"] and "lam = 0.1 and N = 3" in told["missing"]
    assert notes_on(fb.AggITD(N=3, lam=0.1), Series(r, 0.1 * r, n)) == {}
    assert "above 1/L_g" in notes_on(fb.AggITD(N=1, lam=0.1), Series(r, -0.2 * r, 1))["long"]


# The command line -----------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_writes_a_picture(command: Command, tmp_path: Path) -> None:
    outcome = command(
        "diagnose", *sets(*QUADRATIC, "federation.engine=loop"), "--draws", "1", "--out", tmp_path / "d"
    )
    assert outcome.code == 0 and "implicit share" in outcome.out and "--set algorithm.lam=" in outcome.out
    figures = json.loads((tmp_path / "d" / "diagnosis.json").read_text())
    assert figures["solved"] and 0 < figures["mu"] < figures["L_g"] <= 1.0
    assert (tmp_path / "d" / "diagnosis.png").stat().st_size > 10_000


def test_the_command_refuses_a_private_spec(command: Command) -> None:
    one_line(command("diagnose", *sets(*QUADRATIC, "privacy.mode=local")), 2, "privacy.mode", "remove it")
