"""Single-loop methods and controls: fixed points against linear systems, and what they send against formulas.

On the quadratic the directions of client i are affine, d_i(s) = K_i s + k_i with s = (x, y, v). Local steps with
the step sizes E on full batches give the sum W_i d_i(s) with W_i = Σ_{k<τ_i} (I - K_i E)^k, so the fixed point of
the server's step solves Σ_i W_i (K_i s + k_i) = 0. The references are solved in float64.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel._derivatives import JaxOracle
from fedbilevel.algorithms import FedAvg, FedF2SA, FedMSA, FedSOBA, ShroFBO, SimFBO
from fedbilevel.data import DataSettings
from fedbilevel.engines._work import pad
from fedbilevel.oracle import Directions, directions
from fedbilevel.problems import HyperRepresentation, QuadraticTask
from fedbilevel.steps import Chance, Draw

P, Q, CLIENTS = 10, 8, 10
UNEQUAL = (1,) * 5 + (10,) * 5


@cache
def task() -> QuadraticTask:
    return fb.Quadratic(heterogeneity=1.0).make(CLIENTS, 0)


@cache
def systems() -> tuple[np.ndarray, np.ndarray]:
    """K_i and k_i of all clients, in float64."""
    t, matrices, vectors = task(), [], []
    for A, B, b, J, c in zip(*(a.astype(np.float64) for a in (t.A, t.B, t.b, t.J, t.c)), strict=True):
        zero, b, c = np.zeros((Q, Q)), b.mean(0), c.mean(0)
        matrices.append(np.block([[J[:P], -B.T], [B, A, zero], [-J[P:], A]]))
        vectors.append(np.concatenate([c[:P], b, -c[P:]]))
    return np.stack(matrices), np.stack(vectors)


def fixed_point(steps: tuple[int, ...], eta: float, normalised: bool = False) -> np.ndarray:
    """The s with Σ_i W_i (K_i s + k_i) = 0; `normalised` divides W_i by the client's number of steps."""
    K, k = systems()
    one = np.eye(len(k[0]))
    left, right = np.zeros_like(one), np.zeros(len(k[0]))
    for tau, matrix, vector in zip(steps, K, k, strict=True):
        W = sum(np.linalg.matrix_power(one - eta * matrix, j) for j in range(tau)) / (tau if normalised else 1)
        left, right = left + W @ matrix, right - W @ vector
    return np.linalg.solve(left, right)


def trained(method: Any, iterations: int) -> Any:
    """The end of a run in which nothing is measured on the way, so that all iterations are one program."""
    options: dict[str, Any] = dict(stop={"iterations": iterations}, evaluate={"every": iterations}, engine="fused")
    return fb.train(task().problem, task().clients, method, **options)


def left(method: Any, iterations: int) -> float:
    """||∇f|| where a method has ended."""
    return float(np.linalg.norm(task().hypergradient(np.asarray(trained(method, iterations).x))))


def at(s: np.ndarray) -> float:
    return float(np.linalg.norm(task().hypergradient(s[:P])))


# ---------------------------------------------------------------- the directions


def oracles(chance: Chance | None) -> tuple[Any, list[Draw]]:
    made = HyperRepresentation(hidden=6, dropout=0.5 if chance else 0.0).task(
        DataSettings(name="digits", clients=4, partition="dirichlet"), 0
    )
    data = jax.tree.map(jnp.asarray, pad(made.clients.load(1), made.clients.capacity))
    rows = Draw(jnp.asarray([0, 2, 3, 3]), jnp.asarray([1.0, 1.0, 1.0, 0.0]), chance)
    return (made.problem, data), [rows, Draw(None, None, chance)]


@pytest.mark.parametrize("anew", [None, False, True], ids=["no chance", "one mask", "a mask for each derivative"])
@pytest.mark.slow
def test_the_directions_of_one_pass_are_those_of_the_five_derivatives(anew: bool | None) -> None:
    chance = None if anew is None else Chance(jnp.asarray([1, 2], jnp.uint32), anew)
    (problem, data), draws = oracles(chance)
    g = np.random.default_rng(0)
    x, y = problem.flat_x.vector, problem.flat_y.vector
    v, w = (jnp.asarray(g.normal(size=y.size), jnp.float32) for _ in range(2))
    moved = x + jnp.asarray(0.1 * g.normal(size=x.size), jnp.float32)

    @jax.jit
    def both(memory: Any) -> list[tuple[Any, Any]]:
        found = []
        for rows, place in ((draws[0], moved), (draws[1], None)):
            c = JaxOracle(problem, {"x": x, "y": y}, data, memory if place is None else None)
            f_x, g_xy, g_y = c.f_x(w, rows, place), c.g_xy(w, v, rows, place), c.g_y(w, rows, place)
            expected = Directions(f_x - g_xy, g_y, c.g_yy(w, v, rows, place) - c.f_y(w, rows, place))
            found.append((directions(c, w, v, rows, rows, place), expected))
        return found

    for found, expected in both(problem.remember(x, data)):
        for a, b in zip(found, expected, strict=True):
            assert np.linalg.norm(b) > 1e-3
            np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6 * float(np.linalg.norm(b)))


# ---------------------------------------------------------------- fixed points


def test_fedsoba_ends_at_the_stationary_point_whatever_its_steps_are() -> None:
    assert left(FedSOBA(alpha=0.1, beta=0.8, rho=0.4, momentum=0.5, participation=1.0), 400) < 1e-5
    end = trained(FedSOBA(alpha=0.3, beta=0.5, participation=1.0), 400)
    s = fixed_point((1,) * CLIENTS, 0.1)
    np.testing.assert_allclose(np.concatenate([end.x, end.y]), s[: P + Q], atol=1e-4)
    np.testing.assert_allclose(end.x, task().stationary_point, atol=1e-4)


@pytest.mark.slow
def test_the_fixed_point_of_simfbo_solves_the_linear_system_and_does_not_move_with_the_servers_rate() -> None:
    s = fixed_point((5,) * CLIENTS, 0.1)
    assert at(s) == pytest.approx(0.0604489, rel=1e-5), "the value of the notes on methods"
    for gamma in (1.0, 0.5):
        end = trained(SimFBO(alpha=0.1, beta=0.1, tau=5, gamma=gamma, participation=1.0), 800)
        np.testing.assert_allclose(np.concatenate([end.x, end.y]), s[: P + Q], atol=1e-4)


@pytest.mark.slow
def test_the_drift_of_simfbo_shrinks_with_its_local_steps() -> None:
    floors = [at(fixed_point((5,) * CLIENTS, eta)) for eta in (0.1, 0.01, 0.001)]
    assert floors[0] / floors[1] == pytest.approx(10, rel=0.1) and floors[1] / floors[2] == pytest.approx(
        10, rel=0.1
    )
    fine = SimFBO(alpha=0.01, beta=0.01, tau=5, gamma=10, participation=1.0)
    assert left(fine, 800) == pytest.approx(floors[1], abs=1e-4)


@pytest.mark.slow
def test_with_unequal_local_steps_simfbo_goes_to_the_weighted_problem_and_shrofbo_to_the_problem_itself() -> None:
    K, k = systems()
    weights = np.asarray(UNEQUAL, np.float64)
    weighted = -np.linalg.solve(np.tensordot(weights, K, 1), weights @ k)
    floors = {eta: at(fixed_point(UNEQUAL, eta)) for eta in (0.1, 0.001)}
    assert floors[0.001] == pytest.approx(at(weighted), rel=1e-2) and at(weighted) > 0.8
    assert at(fixed_point(UNEQUAL, 0.001, normalised=True)) < 0.003
    how: dict[str, Any] = dict(alpha=0.1, beta=0.1, tau=UNEQUAL, participation=1.0)
    assert left(SimFBO(**how), 600) == pytest.approx(floors[0.1], abs=1e-4)
    assert left(ShroFBO(**how), 600) == pytest.approx(at(fixed_point(UNEQUAL, 0.1, normalised=True)), abs=1e-4)


def test_one_local_step_of_simfbo_is_fedsoba() -> None:
    a = trained(FedSOBA(alpha=0.3, beta=0.5, participation=0.5, batch_zeta=4, batch_xi=4), 20)
    b = trained(SimFBO(alpha=0.3, beta=0.5, participation=0.5, batch_zeta=4, batch_xi=4), 20)
    np.testing.assert_allclose(a.x, b.x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("renewal", [1.0, 0.5])
@pytest.mark.slow
def test_fedmsa_is_exact_even_if_one_client_makes_the_local_steps(renewal: float) -> None:
    assert left(FedMSA(alpha=0.1, beta=0.1, tau=5, participation=1, renewal=renewal), 400) < 1e-4


@pytest.mark.slow
def test_the_bias_of_fed_f2sa_is_of_first_order_and_that_of_the_symmetric_difference_of_second() -> None:
    K, k = (a.mean(0) for a in systems())
    J = np.block([[K[:P, : P + Q]], [-K[P + Q :, : P + Q]]])
    A, B, b, c = K[P : P + Q, P : P + Q], K[P : P + Q, :P], k[P : P + Q], np.concatenate([k[:P], -k[P + Q :]])

    def floor(nu: float, both: bool) -> float:
        """The fixed point of the two lower problems and of the difference: a linear system in (x, y₊, y₋)."""
        zero, low = np.zeros((Q, Q)), -nu if both else 0.0
        half = 0.5 if both else 1.0
        f_x = [J[:P, :P], half * J[:P, P:], (1 - half) * J[:P, P:]]
        rows = [
            [f_x[0], f_x[1] + half / nu * B.T, f_x[2] - half / nu * B.T],
            [B + nu * J[P:, :P], A + nu * J[P:, P:], zero],
            [B + low * J[P:, :P], zero, A + low * J[P:, P:]],
        ]
        right = np.concatenate([c[:P], b + nu * c[P:], b + low * c[P:]])
        return at(np.linalg.solve(np.block(rows), -right))

    assert floor(0.1, False) / floor(0.01, False) == pytest.approx(10, rel=0.2)
    assert floor(0.1, True) / floor(0.01, True) == pytest.approx(100, rel=0.2)
    how: dict[str, Any] = dict(alpha=0.1, beta=0.5, participation=1.0)
    assert left(FedF2SA(nu=0.01, **how), 1000) == pytest.approx(floor(0.01, False), rel=5e-3)
    assert left(FedF2SA(nu=0.1, difference="symmetric", **how), 1000) == pytest.approx(floor(0.1, True), rel=5e-3)


@pytest.mark.slow
def test_the_controls_solve_other_problems() -> None:
    t, start = task(), float(np.linalg.norm(task().hypergradient(np.zeros(P))))
    A, B, b, J, c = t._means
    joint = np.block([[np.zeros((P, P)), B.T], [B, A]]) + J
    s = -np.linalg.solve(joint, np.concatenate([np.zeros(P), b]) + c)
    found = trained(FedAvg(alpha=0.1, beta=0.1, participation=1.0), 800)
    np.testing.assert_allclose(np.concatenate([found.x, found.y]), s, atol=1e-4)
    assert at(s) > start, "the joint minimum is worse than the start"
    lower = trained(FedAvg(control="lower-only", beta=0.5, participation=1.0), 200)
    assert not np.any(lower.x)
    np.testing.assert_allclose(lower.y, t.solution(np.zeros(P)), atol=1e-4)
    upper = trained(FedAvg(control="upper-only", alpha=0.5, participation=1.0), 200)
    assert not np.any(upper.y)
    np.testing.assert_allclose(upper.x, -np.linalg.solve(J[:P, :P], c[:P]), atol=1e-4)
    first = FedAvg(control="first-order", alpha=0.1, beta=0.1, participation=1.0)
    without_v = np.block([[J[:P]], [B, A]])
    place = -np.linalg.solve(without_v, np.concatenate([c[:P], b]))
    np.testing.assert_allclose(trained(first, 800).x, place[:P], atol=1e-4)


def test_adagrad_steps_come_close_without_step_sizes() -> None:
    start = float(np.linalg.norm(task().hypergradient(np.zeros(P))))
    assert left(FedSOBA(steps="adagrad", alpha=1.0, beta=1.0, participation=1.0), 600) < 0.3 * start


# ---------------------------------------------------------------- what is sent


@pytest.mark.parametrize(
    ("method", "rounds", "up", "down"),
    [
        (FedSOBA(), 1, P + 2 * Q, P + 2 * Q),
        (SimFBO(tau=3), 1, P + 2 * Q, P + 2 * Q),
        (ShroFBO(tau=3), 1, P + 2 * Q, P + 2 * Q),  # and a scalar, which is no payload
        (FedF2SA(), 1, P + 2 * Q, P + 2 * Q),
        (FedF2SA(difference="symmetric"), 1, P + 2 * Q, P + 2 * Q),
        (FedAvg(), 1, P + Q, P + Q),
        (FedMSA(tau=2), 2, 2 * (P + 2 * Q), 2 * (P + 2 * Q)),
        (FedMSA(tau=2, renewal=0.5), 2, 2 * (P + 2 * Q), 3 * (P + 2 * Q)),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, int) else "",
)
def test_rounds_and_numbers_on_the_wire_are_those_of_the_formulas(
    method: Any, rounds: int, up: int, down: int
) -> None:
    everybody = dataclasses.replace(method, participation=1.0)
    fed = fb.Federation(fb.Simulation(task().problem, task().clients, devices=1))
    state = everybody.init(task().problem, CLIENTS)
    for _ in range(2):
        state = everybody.step(fed, state)
    assert fed.ledger.rounds == 2 * rounds
    assert (fed.ledger.bytes_up, fed.ledger.bytes_down) == (2 * 4 * CLIENTS * up, 2 * 4 * CLIENTS * down)


def test_fedmsa_asks_every_client_first_and_then_its_cohort() -> None:
    fed = fb.Federation(fb.Simulation(task().problem, task().clients, devices=1))
    method = FedMSA(tau=2, participation=2)
    method.step(fed, method.init(task().problem, CLIENTS))
    assert fed.ledger.bytes_up == 4 * (CLIENTS + 2) * (P + 2 * Q)


@pytest.mark.slow
def test_a_resumed_run_goes_on_with_v_and_the_momenta(tmp_path: Any) -> None:
    method = FedSOBA(alpha=0.1, beta=0.3, momentum=0.5, steps="adagrad", participation=0.5, batch_zeta=4)
    how: dict[str, Any] = dict(out=tmp_path / "run", resume=True)
    fb.train(task().problem, task().clients, method, stop={"iterations": 3}, **how)
    went_on = fb.train(task().problem, task().clients, method, stop={"iterations": 6}, **how)
    whole = fb.train(task().problem, task().clients, method, stop={"iterations": 6})
    np.testing.assert_array_equal(went_on.x, whole.x)
    np.testing.assert_array_equal(went_on.y, whole.y)
