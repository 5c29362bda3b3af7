"""Naive federated ITD against the derivative it stands for, a dense reference, AggITD, and its own ledger."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel import AggITD, Federation, NaiveITD, Simulation
from fedbilevel.algorithms.local import State, hypergradient
from fedbilevel.problems import Quadratic, QuadraticTask

EXACT: dict[str, Any] = dict(participation=1.0, batch_zeta_local="full", lower_steps=1)


def relative(got: Any, expected: Any) -> float:
    got, expected = np.asarray(got, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def f32(a: Any) -> Any:
    return jnp.asarray(np.asarray(a), jnp.float32)


@pytest.fixture(scope="module")
def small() -> QuadraticTask:
    """Four unlike clients; their minibatches are noisy, their full batches exact."""
    return Quadratic(size_x=4, size_y=3, condition=4.0, heterogeneity=2.0, noise=1.0, rows=4).make(4, seed=0)


@pytest.fixture(scope="module")
def engine(small: QuadraticTask) -> Simulation:
    return Simulation(small.problem, small.clients, devices=1)


@pytest.fixture(scope="module")
def away() -> tuple[Any, Any]:
    """A point away from every solution."""
    g = np.random.default_rng(8)
    return g.normal(size=4), 3 * g.normal(size=3)


def forward(method: NaiveITD, fed: Federation, x: Any, y: Any) -> list[Any]:
    """y^0, ..., y^N of the method at x."""
    fed.hold(x=f32(x))
    path = [f32(y)]
    for _ in range(method.N):
        path.append(method.descend(fed, path[-1]))
    return path


def dense(task: QuadraticTask, x: Any, path: list[Any], lam: float) -> Any:
    """The paper's sum and product on the matrices of a quadratic, in float64. Every term is multiplied out."""
    A, B, _, J, c = task.means
    N, p = len(path) - 1, task.size_x
    gradient = J @ np.concatenate([x, np.asarray(path[-1], np.float64)]) + c
    h = gradient[:p].copy()
    for t in range(N):
        product = np.eye(len(A))
        for _ in range(t + 1, N):
            product = product @ (np.eye(len(A)) - lam * A)
        h -= lam * B.T @ product @ gradient[p:]
    return h


@pytest.mark.parametrize("N", [1, 2, 5])
@pytest.mark.parametrize("solver", ["svrg", "sgd"])
def test_it_is_the_sum_of_the_paper(
    small: QuadraticTask, engine: Simulation, away: Any, N: int, solver: Any
) -> None:
    (x, y), fed = away, Federation(engine)
    method = NaiveITD(**{**EXACT, "lower_steps": (1, 3, 2, 4)}, N=N, lam=0.7, beta=0.3, lower_solver=solver)
    path = forward(method, fed, x, y)
    assert relative(path[-1], y) > 0.1, "y moves"
    assert relative(method.differentiate(fed, path), dense(small, x, path, 0.7)) < 1e-5


def error(y: Any, inputs: Any, targets: Any) -> Any:
    """The logistic loss of each row, whose Hessian depends on y."""
    return jnp.logaddexp(0.0, -targets * (inputs @ y))


def lower(x: Any, y: Any, error: Any) -> Any:
    return 4 * error + 0.5 * jnp.sum(jnp.exp(x) * y**2)


def upper(x: Any, error: Any) -> Any:
    return error + 0.1 * jnp.sum(x**2)


def curved() -> fb.Task:
    """A problem whose second derivatives depend on y, so that it matters at which y^t they are taken."""
    g = np.random.default_rng(3)

    def rows() -> Any:
        return g.normal(size=(6, 3)).astype(np.float32), g.choice([-1.0, 1.0], size=6).astype(np.float32)

    problem = fb.Problem(
        x=jnp.array([0.1, -0.4, 0.3]),
        y=jnp.array([1.0, 2.0, -1.0]),
        lower=lambda x, y, b: lower(x, y, b.mean(error(y, b.inputs, b.targets))),
        upper=lambda x, y, b: upper(x, b.mean(error(y, b.inputs, b.targets))),
    )
    return fb.Task(problem, fb.clients_from([(rows(), rows()) for _ in range(3)]))


@pytest.mark.slow
def test_with_lam_equal_to_beta_it_is_the_derivative_of_the_lower_loop() -> None:
    """The reference differentiates f(x, y^N(x)) through the N steps of gradient descent on the mean loss."""
    task, N, beta = curved(), 4, 0.2
    problem: Any = task.problem
    data = [task.clients.load(i) for i in range(3)]  # Clients have equally many rows, so all rows are one mean.
    low, up = (
        tuple(np.concatenate(a) for a in zip(*parts, strict=True))
        for parts in zip(*(d[:2] for d in data), strict=True)
    )

    def end(x: Any) -> Any:
        y = problem.flat_y.vector
        for _ in range(N):
            y = y - beta * jax.grad(lambda v: lower(x, v, error(v, *low).mean()))(y)
        return upper(x, error(y, *up).mean())

    x, y = problem.flat_x.vector, problem.flat_y.vector
    fed = Federation(Simulation(problem, task.clients, devices=1))
    method = NaiveITD(**EXACT, N=N, lam=beta, beta=beta)
    h = method.differentiate(fed, forward(method, fed, x, y))
    assert relative(h, jax.jit(jax.grad(end))(x)) < 1e-5
    # AggITD takes the same derivatives in another order, so it is another number with the same limit.
    fed.hold(x=x)
    aggregated = AggITD(**EXACT, N=N, lam=beta, beta=beta, estimator="summed")
    p = aggregated.estimate(fed, y)[1]
    other = fed.round(hypergradient, p=p, xi=method.xi, chi=method.chi).h
    assert relative(other, h) > 1e-2


def summed(fed: Federation, x: Any, y: Any, N: int, lam: float) -> Any:
    """The hypergradient of AggITD's summed estimator."""
    method = AggITD(**EXACT, N=N, lam=lam, beta=0.3, estimator="summed")
    fed.hold(x=f32(x))
    p = method.estimate(fed, f32(y))[1]
    return fed.round(hypergradient, p=p, xi=method.xi, chi=method.chi).h


def test_at_the_lower_solution_it_is_aggitds_sum_with_one_term_less(
    small: QuadraticTask, engine: Simulation, away: Any
) -> None:
    """There both are a truncated Neumann series: AggITD's has the terms 0, ..., N and this one 0, ..., N-1."""
    x, lam = away[0], 0.7
    y, fed = small.solution(x), Federation(engine)

    def naive(N: int) -> Any:
        method = NaiveITD(**EXACT, N=N, lam=lam, beta=0.3)
        return method.differentiate(fed, forward(method, fed, x, y))

    assert relative(naive(4), summed(fed, x, y, 3, lam)) < 1e-5
    assert relative(naive(3), summed(fed, x, y, 3, lam)) > 1e-3


def test_elsewhere_the_difference_to_aggitd_is_where_the_upper_gradient_is_taken(
    small: QuadraticTask, engine: Simulation, away: Any
) -> None:
    """On a quadratic: λ B̄ᵀ Σ_Q (I - λĀ)^(N-Q) (∇_y f(y^Q) - ∇_y f(y^N)), and the one term that AggITD has more."""
    (x, y), N, lam, fed = away, 3, 0.7, Federation(engine)
    method = NaiveITD(**EXACT, N=N, lam=lam, beta=0.3)
    path = forward(method, fed, x, y)
    A, B, _, J, c = small.means
    f_y = [(J @ np.concatenate([x, np.asarray(v, np.float64)]) + c)[4:] for v in path]
    shrink = np.eye(3) - lam * A
    apart = sum(np.linalg.matrix_power(shrink, N - Q) @ (f_y[Q] - f_y[N]) for Q in range(N + 1))
    apart = lam * B.T @ (apart + np.linalg.matrix_power(shrink, N) @ f_y[N])
    difference = np.asarray(method.differentiate(fed, path)) - np.asarray(summed(fed, x, y, N, lam))
    assert relative(difference, apart) < 1e-4


@pytest.mark.slow
def test_on_single_rows_it_is_unbiased(small: QuadraticTask, engine: Simulation, away: Any) -> None:
    """For a given path. Rows differ by additive noise, so h is affine in every draw."""
    (x, y), fed, draws = away, Federation(engine, seed=4), 150
    exact = NaiveITD(**EXACT, N=2, lam=0.7, beta=0.3)
    path = forward(exact, fed, x, y)
    noisy = NaiveITD(**EXACT, N=2, lam=0.7, beta=0.3, batch_xi=1, batch_u=1, batch_chi=1)
    h = np.stack([np.asarray(noisy.differentiate(fed, path), np.float64) for _ in range(draws)])
    error = h.std(0) / np.sqrt(draws)
    assert error.min() > 1e-3, "the rows are noisy"
    assert (np.abs(h.mean(0) - dense(small, x, path, 0.7)) < 4 * error).all()


@pytest.mark.parametrize("N", [1, 2, 4])
@pytest.mark.parametrize("solver", ["svrg", "sgd"])
def test_the_ledger_measures_the_rounds_and_the_floats(
    small: QuadraticTask, engine: Simulation, N: int, solver: Any
) -> None:
    method, fed = NaiveITD(N=N, participation=3, lower_solver=solver, lower_steps=2), Federation(engine)
    state, p, q = method.init(small.problem), 4, 3
    for _ in range(2):
        state = method.step(fed, state)
    svrg = solver == "svrg"
    assert fed.ledger.rounds == 2 * ((3 if svrg else 2) * N + 2)
    up, down = (N + 2) * p + (3 if svrg else 2) * N * q, 2 * p + ((4 if svrg else 3) * N + 1) * q
    assert (fed.ledger.bytes_up, fed.ledger.bytes_down) == (2 * 3 * 4 * up, 2 * 3 * 4 * down)
    backward = fed.ledger.steps["backward_products"]
    assert backward.rounds == 2 * N
    assert backward.bytes_down == 2 * 3 * 4 * 2 * N * q, "y^t is sent again, beside v"


def test_an_outer_iteration_steps_along_h_and_keeps_the_last_lower_iterate(
    small: QuadraticTask, engine: Simulation, away: Any
) -> None:
    (x, y), fed = away, Federation(engine)
    method = NaiveITD(**EXACT, N=3, lam=0.7, beta=0.3, alpha=0.2)
    path = forward(method, fed, x, y)
    moved = method.step(fed, State(f32(x), f32(y)))
    assert relative(moved.y, path[-1]) < 1e-6
    assert relative(moved.x, x - 0.2 * dense(small, x, path, 0.7)) < 1e-5


def test_it_reaches_the_stationary_point(quadratic: QuadraticTask) -> None:
    lam = 1 / quadratic.constants(1.0).L_g
    work: dict[str, Any] = dict(participation=1.0, lower_steps=3, upper_steps=3, batch_zeta_local="full")
    method = NaiveITD(**work, N=20, lam=lam, alpha=0.5, beta=0.2)
    fed = Federation(Simulation(quadratic.problem, quadratic.clients))
    state = method.init(quadratic.problem)
    start = np.linalg.norm(quadratic.hypergradient(state.x))
    for _ in range(10):
        state = method.step(fed, state)
    assert np.linalg.norm(quadratic.hypergradient(state.x)) < 1e-2 * start
