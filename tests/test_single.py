"""Single-loop methods and controls: fixed points against linear systems, and what they send against formulas.

On the quadratic the directions of client i are affine, so fixed points solve linear systems
(`fedbilevel.theory.fixed_point`), in float64.
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
from fedbilevel.algorithms import FedAvg, FedBiO, FedBiOAcc, FedF2SA, FedMSA, FedSOBA, QFedAvg, ShroFBO, SimFBO
from fedbilevel.data import DataSettings
from fedbilevel.engines._work import pad
from fedbilevel.oracle import Directions, directions
from fedbilevel.problems import HyperRepresentation, QuadraticTask
from fedbilevel.steps import Chance, Draw
from fedbilevel.theory import fixed_point, floor_of

P, Q, CLIENTS = 10, 8, 10
UNEQUAL = (1,) * 5 + (10,) * 5


@cache
def task() -> QuadraticTask:
    return fb.Quadratic(heterogeneity=1.0).make(CLIENTS, 0)


def trained(method: Any, iterations: int) -> Any:
    """The end of a run in which nothing is measured on the way, so that all iterations are one program."""
    options: dict[str, Any] = dict(stop={"iterations": iterations}, evaluate={"every": iterations}, engine="fused")
    return fb.train(task().problem, task().clients, method, **options)


def left(method: Any, iterations: int) -> float:
    """||∇f|| where a method has ended."""
    return float(np.linalg.norm(task().hypergradient(np.asarray(trained(method, iterations).x))))


def many(methods: list[Any], iterations: int, seeds: int = 1) -> list[Any]:
    """The ends of methods that differ in numbers only, with some seeds each."""
    own = [dict(renewal=each.renewal) for each in methods]
    how: dict[str, Any] = dict(settings=own, seeds=range(seeds), stop={"iterations": iterations}, devices=1)
    how["evaluate"] = {"every": iterations}
    return fb.train_many(task().problem, task().clients, methods[0], **how)


def at(s: Any) -> float:
    return float(np.linalg.norm(task().hypergradient(np.asarray(s)[:P])))


def point(method: Any) -> np.ndarray:
    found = fixed_point(task(), method)
    assert found is not None
    return found


def floor(method: Any) -> float:
    found = floor_of(task(), method)
    assert found is not None
    return found


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
    np.testing.assert_allclose(np.concatenate([end.x, end.y]), point(FedSOBA())[: P + Q], atol=1e-4)
    np.testing.assert_allclose(end.x, task().stationary_point, atol=1e-4)


@pytest.mark.slow
def test_the_fixed_point_of_simfbo_solves_the_linear_system_and_does_not_move_with_the_servers_rate() -> None:
    method = SimFBO(alpha=0.1, beta=0.1, tau=5, participation=1.0)
    assert floor_of(task(), method) == pytest.approx(0.0604489, rel=1e-5), "the value of the notes on methods"
    for gamma in (1.0, 0.5):
        end = trained(dataclasses.replace(method, gamma=gamma), 800)
        np.testing.assert_allclose(np.concatenate([end.x, end.y]), point(method)[: P + Q], atol=1e-4)


def test_fedbio_is_simfbo_with_a_server_that_takes_the_mean() -> None:
    own: dict[str, Any] = dict(alpha=0.1, beta=0.1, tau=3, participation=0.5)
    ends = [trained(method, 3) for method in (FedBiO(**own), SimFBO(gamma=1.0, **own))]
    np.testing.assert_array_equal(ends[0].x, ends[1].x)
    assert floor(FedBiO(**own)) == floor(SimFBO(**own))


@pytest.mark.slow
def test_the_drift_of_simfbo_shrinks_with_its_local_steps() -> None:
    floors = [floor(SimFBO(alpha=eta, beta=eta, tau=5)) for eta in (0.1, 0.01, 0.001)]
    assert floors[0] / floors[1] == pytest.approx(10, rel=0.1) and floors[1] / floors[2] == pytest.approx(
        10, rel=0.1
    )
    fine = SimFBO(alpha=0.01, beta=0.01, tau=5, gamma=10, participation=1.0)
    assert left(fine, 800) == pytest.approx(floors[1], abs=1e-4)


@pytest.mark.slow
def test_with_unequal_local_steps_simfbo_goes_to_the_weighted_problem_and_shrofbo_to_the_problem_itself() -> None:
    K, k = task().affine_directions
    weights = np.asarray(UNEQUAL, np.float64)
    weighted = -np.linalg.solve(np.tensordot(weights, K, 1), weights @ k)
    fine: dict[str, Any] = dict(alpha=0.001, beta=0.001, tau=UNEQUAL)
    assert floor(SimFBO(**fine)) == pytest.approx(at(weighted), rel=1e-2) and at(weighted) > 0.8
    assert floor(ShroFBO(**fine)) < 0.003
    for method in (SimFBO, ShroFBO):
        own = method(alpha=0.1, beta=0.1, tau=UNEQUAL, participation=1.0)
        assert left(own, 600) == pytest.approx(floor(own), abs=1e-4)


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
    assert floor(FedF2SA(nu=0.1)) / floor(FedF2SA(nu=0.01)) == pytest.approx(10, rel=0.2)
    both = [FedF2SA(nu=nu, difference="symmetric") for nu in (0.1, 0.01)]
    assert floor(both[0]) / floor(both[1]) == pytest.approx(100, rel=0.2)
    how: dict[str, Any] = dict(alpha=0.1, beta=0.5, participation=1.0)
    for method in (FedF2SA(nu=0.01, **how), FedF2SA(nu=0.1, difference="symmetric", **how)):
        assert left(method, 1000) == pytest.approx(floor(method), rel=5e-3)


def test_the_floor_of_fedbioacc_is_that_of_its_linear_system_and_shrinks_with_the_renewal() -> None:
    how: dict[str, Any] = dict(alpha=0.1, beta=0.1, tau=5, participation=1.0)
    methods = [FedBiOAcc(renewal=c, **how) for c in (1.0, 0.5, 0.1, 0.01)]
    notes = [0.0374, 0.0244, 0.00602, 0.00063]
    assert [floor(each) for each in methods] == pytest.approx(notes, rel=1e-2), (
        "the values of the notes on methods"
    )
    assert floor(dataclasses.replace(methods[0], renewal=1e-9)) < 1e-9
    for method, end in zip(methods[1:3], many(methods[1:3], 500), strict=True):
        s = point(method)[: P + Q]
        assert np.linalg.norm(np.concatenate([end.x, end.y]) - s) < 1e-4 * np.linalg.norm(s)
        assert at(end.x) == pytest.approx(floor(method), rel=1e-2)


def test_one_message_with_points_and_momenta_would_lose_the_correction_of_fedbioacc() -> None:
    """In float64: if s_i and M_i are averaged together, the momentum is the mean of those at the clients' ends."""
    K, k = task().affine_directions
    floors = []
    for c in (1.0, 0.1):
        s, M = np.zeros(K.shape[1]), np.zeros(K.shape[1])
        for _ in range(1500):
            s_i, M_i = np.tile(s, (CLIENTS, 1)), np.tile(M, (CLIENTS, 1))
            for _ in range(5):
                old = np.einsum("ijk,ik->ij", K, s_i) + k
                s_i = s_i - 0.1 * M_i
                M_i = np.einsum("ijk,ik->ij", K, s_i) + k + (1 - c) * (M_i - old)
            s, M = s_i.mean(0), M_i.mean(0)
        floors.append(at(s))
    two = [floor(FedBiOAcc(alpha=0.1, beta=0.1, tau=5, renewal=c)) for c in (1.0, 0.1)]
    assert min(floors) > 0.05 and floors[0] == pytest.approx(floors[1], rel=0.05), "whatever c is"
    assert two[0] < 0.7 * floors[0] and two[1] < 0.11 * floors[1]


def test_the_momentum_of_fedbioacc_averages_out_the_sampling_of_cohorts() -> None:
    how: dict[str, Any] = dict(alpha=0.1, beta=0.3, tau=2, participation=5)
    ends = many([FedBiOAcc(renewal=c, **how) for c in (0.9, 0.1)], 300, seeds=4)
    often, seldom = (np.mean([at(end.x) for end in part]) for part in (ends[:4], ends[4:]))
    assert seldom < 0.6 * often


@pytest.mark.slow
def test_the_controls_solve_other_problems() -> None:
    start = float(np.linalg.norm(task().hypergradient(np.zeros(P))))
    joint, lower, upper, first = (
        FedAvg(control=control, alpha=0.1, beta=0.1, participation=1.0)
        for control in ("joint", "lower-only", "upper-only", "first-order")
    )
    for method, moves in ((joint, "xy"), (lower, "y"), (upper, "x"), (first, "xy")):
        end, s = trained(method, 800), point(method)
        np.testing.assert_allclose(np.concatenate([end.x, end.y]), s, atol=1e-4)
        assert [bool(np.any(a)) for a in (end.x, end.y)] == ["x" in moves, "y" in moves]
    assert floor(joint) > start, "the joint minimum is worse than the start"


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
        (QFedAvg(), 1, P, P + Q),  # and a scalar
        (QFedAvg(control="lower-only"), 1, Q, P + Q),
        (FedMSA(tau=2), 2, 2 * (P + 2 * Q), 2 * (P + 2 * Q)),
        (FedMSA(tau=2, renewal=0.5), 2, 2 * (P + 2 * Q), 3 * (P + 2 * Q)),
        (FedBiOAcc(tau=2), 2, 2 * (P + 2 * Q), 2 * (P + 2 * Q)),
        (FedBiOAcc(tau=2, renewal=0.5), 2, 2 * (P + 2 * Q), 3 * (P + 2 * Q)),
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
