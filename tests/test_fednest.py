"""FedNest and LFedNest against closed forms and dense references."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import Federation, Simulation
from fedbilevel.algorithms import FedNest, LFedNest
from fedbilevel.algorithms.local import State, hypergradient
from fedbilevel.problems import Quadratic, QuadraticTask
from fedbilevel.steps import Sample

Held = tuple[Federation, np.ndarray, np.ndarray]


def relative(got: Any, expected: Any) -> float:
    a, b = np.asarray(got, float), np.asarray(expected, float)
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.fixture(scope="module")
def held(quadratic: QuadraticTask) -> Held:
    """A federation whose clients hold an x and the y*(x) that belongs to it."""
    x = np.random.default_rng(1).normal(size=quadratic.size_x).astype(np.float32)
    y = quadratic.solution(x).astype(np.float32)
    fed = Federation(Simulation(quadratic.problem, quadratic.clients))
    fed.hold(x=jnp.asarray(x), y=jnp.asarray(y))
    return fed, x, y


def upper_gradient_of(task: QuadraticTask, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """∇_y f at (x, y), dense and in float64."""
    J, c = task.J.astype(float).mean(0), task.c.astype(float).mean((0, 1))
    return (J @ np.concatenate([x, y]).astype(float) + c)[x.size :]


def test_paper_mode_with_300_terms_matches_the_closed_form_hypergradient(
    quadratic: QuadraticTask, held: Held
) -> None:
    fed, x, _ = held
    method = FedNest(T=300, lam=1 / quadratic.constants(1.0).L_g, estimator="summed", participation=1.0)
    h = fed.round(hypergradient, p=method.estimate(fed), xi=Sample("upper"), chi=Sample("lower")).h
    assert relative(h, quadratic.hypergradient(x)) < 1e-4


def test_the_mean_over_every_T_drawn_is_the_summed_estimate(quadratic: QuadraticTask, held: Held) -> None:
    fed, _, _ = held
    lam = 1 / quadratic.constants(1.0).L_g
    sampled = FedNest(T=6, lam=lam, participation=1.0)
    mean = sum(np.asarray(sampled.estimate(fed, T_drawn)) for T_drawn in range(6)) / 6
    summed = FedNest(T=6, lam=lam, estimator="summed", participation=1.0).estimate(fed)
    assert relative(mean, summed) < 1e-5


def test_one_draw_equals_the_dense_product_of_averaged_hessians(quadratic: QuadraticTask, held: Held) -> None:
    fed, x, y = held
    lam, A = 0.3, quadratic.A.astype(float).mean(0)
    for T_drawn in (0, 2, 4):
        got = FedNest(T=5, lam=lam, participation=1.0).estimate(fed, T_drawn)
        power = np.linalg.matrix_power(np.eye(len(A)) - lam * A, T_drawn)
        assert relative(got, lam * 5 * power @ upper_gradient_of(quadratic, x, y)) < 1e-5


def test_released_mode_is_what_the_scripts_compute(quadratic: QuadraticTask, held: Held) -> None:
    """A literal transcription of their loop: own counters, a list of replies that is never cleared."""
    fed, x, y = held
    alpha, T = 0.3, 4
    p_0 = upper_gradient_of(quadratic, x, y)
    p, replies, counters = p_0.copy(), [], [p_0.copy() for _ in quadratic.A]
    for _ in range(T):
        for i, A in enumerate(quadratic.A.astype(float)):
            counters[i] = counters[i] - alpha * A @ counters[i]
            replies.append(p + counters[i])
        p = np.mean(replies, axis=0)
    method = FedNest(T=T, alpha=alpha, mode="released_code", participation=1.0)
    assert relative(method.released_estimate(fed), alpha * p) < 1e-5


@pytest.mark.parametrize(
    ("method", "rounds"),
    [
        (FedNest(N=1, T=5), 10),
        (FedNest(N=3, T=2), 11),
        (FedNest(N=2, T=4, mode="released_code"), 11),
        (FedNest(N=2, T=4, lower_solver="sgd"), 9),
        (LFedNest(N=2), 5),
        (LFedNest(N=2, lower_solver="sgd"), 3),
    ],
    ids=lambda v: f"{type(v).__name__}-{v.N}-{v.lower_solver}" if not isinstance(v, int) else str(v),
)
def test_the_ledger_measures_the_rounds_of_an_outer_iteration(
    quadratic: QuadraticTask, method: FedNest | LFedNest, rounds: int
) -> None:
    fed = Federation(Simulation(quadratic.problem, quadratic.clients))
    state = method.init(quadratic.problem)
    for _ in range(2):
        state = method.step(fed, state)
    assert fed.ledger.rounds == 2 * rounds


def test_stopping_early_saves_the_rounds_after_the_drawn_one(quadratic: QuadraticTask) -> None:
    fed = Federation(Simulation(quadratic.problem, quadratic.clients))
    fed.hold(x=quadratic.problem.flat_x.vector, y=quadratic.problem.flat_y.vector)
    FedNest(T=5, stop_early=True, participation=1.0).estimate(fed, T_drawn=2)
    assert fed.ledger.rounds == 3


def test_fednest_reaches_the_stationary_point(quadratic: QuadraticTask) -> None:
    method = FedNest(
        N=20,
        T=40,
        lam=1 / quadratic.constants(1.0).L_g,
        estimator="summed",
        alpha=0.5,
        beta=0.2,
        lower_steps=3,
        upper_steps=3,
        batch_zeta_local="full",
        participation=1.0,
    )
    fed = Federation(Simulation(quadratic.problem, quadratic.clients))
    state = method.init(quadratic.problem)
    start = np.linalg.norm(quadratic.hypergradient(state.x))
    for _ in range(12):
        state = method.step(fed, state)
    assert np.linalg.norm(quadratic.hypergradient(state.x)) < 1e-4 * start


def test_lfednest_takes_the_mean_of_local_hypergradients_which_is_not_the_hypergradient(
    quadratic: QuadraticTask,
) -> None:
    """One upper step from (x, y) with y fixed: the dense mean of local estimates, and its distance from ∇f."""
    x = np.random.default_rng(2).normal(size=quadratic.size_x).astype(np.float32)
    y = quadratic.solution(x).astype(np.float32)
    lam, T, alpha = 0.5, 60, 1.0
    # N lower rounds would move y; with a vanishing step they do not.
    method = LFedNest(lam=lam, T=T, alpha=alpha, beta=1e-12, lower_steps=1, participation=1.0)
    fed = Federation(Simulation(quadratic.problem, quadratic.clients))
    moved = method.step(fed, State(jnp.asarray(x), jnp.asarray(y))).x
    p, z, local = quadratic.size_x, np.concatenate([x, y]).astype(float), []
    for A, B, J, c in zip(quadratic.A, quadratic.B, quadratic.J, quadratic.c, strict=True):
        g = J.astype(float) @ z + c.astype(float).mean(0)
        series = sum(np.linalg.matrix_power(np.eye(len(A)) - lam * A.astype(float), k) for k in range(T + 1))
        local.append(g[:p] - B.T.astype(float) @ (lam * series @ g[p:]))
    mean = np.mean(local, axis=0)
    assert relative((x - np.asarray(moved)) / alpha, mean) < 1e-4
    assert relative(mean, quadratic.hypergradient(x)) > 0.05


def test_lfednest_with_equal_clients_finds_the_hypergradient() -> None:
    task = Quadratic(heterogeneity=0.0).make(clients=4, seed=3)
    x = np.random.default_rng(2).normal(size=task.size_x).astype(np.float32)
    y = task.solution(x).astype(np.float32)
    method = LFedNest(lam=0.5, T=300, alpha=1.0, beta=1e-12, lower_steps=1, participation=1.0)
    fed = Federation(Simulation(task.problem, task.clients))
    moved = method.step(fed, State(jnp.asarray(x), jnp.asarray(y))).x
    assert relative(x - np.asarray(moved), task.hypergradient(x)) < 1e-3
