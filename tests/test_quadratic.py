"""The quadratic's closed forms, constants and dials against dense float64 arithmetic of this file."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel.data import DataSettings
from fedbilevel.errors import SettingsError
from fedbilevel.problems import Quadratic, QuadraticTask

M, P, Q, ROWS, RADIUS = 5, 4, 3, 6, 2.0


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    return Quadratic(size_x=P, size_y=Q, heterogeneity=2.0, noise=1.5, rows=ROWS).make(clients=M, seed=1)


def wide(task: QuadraticTask) -> tuple[Any, ...]:
    return tuple(a.astype(np.float64) for a in (task.A, task.B, task.b, task.J, task.c))


def lower(task: QuadraticTask, x: Any, y: Any) -> float:
    A, B, b, _, _ = wide(task)
    return float(np.mean([[0.5 * y @ A[i] @ y + y @ (B[i] @ x + b[i, r]) for r in range(ROWS)] for i in range(M)]))


def upper(task: QuadraticTask, z: Any) -> float:
    _, _, _, J, c = wide(task)
    return float(np.mean([[0.5 * z @ J[i] @ z + z @ c[i, r] for r in range(ROWS)] for i in range(M)]))


def grad_g(task: QuadraticTask, i: int, r: Any, z: Any) -> Any:
    """The gradient in z = (x, y) of g_ir."""
    A, B, b, _, _ = wide(task)
    x, y = z[:P], z[P:]
    return np.concatenate([B[i].T @ y, A[i] @ y + B[i] @ x + (b[i, r] if r is not None else b[i].mean(0))])


def grad_f(task: QuadraticTask, i: int, r: Any, z: Any) -> Any:
    _, _, _, J, c = wide(task)
    return J[i] @ z + (c[i, r] if r is not None else c[i].mean(0))


def points(count: int, size: int = P + Q, radius: float = RADIUS) -> Any:
    """Random points of the ball, some of them on its surface."""
    g = np.random.default_rng(0)
    v = g.normal(size=(count, size))
    v /= np.linalg.norm(v, axis=1, keepdims=True)
    return radius * v * np.where(np.arange(count) % 2, 1.0, g.uniform(size=count))[:, None]


def test_the_solution_minimises_the_mean_lower_loss(task: QuadraticTask) -> None:
    for x in points(3, P):
        y = task.solution(x)
        least = lower(task, x, y)
        assert all(lower(task, x, y + d) > least for d in points(20, Q, radius=1e-3))
        slopes = [(lower(task, x, y + e) - lower(task, x, y - e)) / 2e-4 for e in 1e-4 * np.eye(Q)]
        np.testing.assert_allclose(slopes, 0, atol=1e-9)


def test_the_hypergradient_is_that_of_finite_differences(task: QuadraticTask) -> None:
    A, B, b, _, _ = wide(task)

    def value(x: Any) -> float:
        y = -np.linalg.solve(A.mean(0), B.mean(0) @ x + b.mean((0, 1)))
        return upper(task, np.concatenate([x, y]))

    for x in points(3, P):
        differences = [(value(x + e) - value(x - e)) / 2e-3 for e in 1e-3 * np.eye(P)]
        np.testing.assert_allclose(task.hypergradient(x), differences, rtol=1e-8, atol=1e-9)
    x = points(1, P)[0]
    assert abs(task.hypergradient(x, task.solution(x) + 1) - task.hypergradient(x)).max() > 1e-2
    # the upper loss really falls against it
    assert value(x - 1e-3 * task.hypergradient(x)) < value(x) < value(x + 1e-3 * task.hypergradient(x))


def test_the_stationary_point_is_one_and_the_minimum(task: QuadraticTask) -> None:
    x = task.stationary_point
    assert np.linalg.norm(task.hypergradient(x)) < 1e-10 < np.linalg.norm(task.hypergradient(x + 0.1))
    best = upper(task, np.concatenate([x, task.solution(x)]))
    for d in points(20, P, radius=0.1):
        assert upper(task, np.concatenate([x + d, task.solution(x + d)])) > best


def test_what_is_measured_is_the_norm_and_the_gap(task: QuadraticTask) -> None:
    x: Any = task.stationary_point + 0.1
    y: Any = np.ones(Q)
    measured = task.measure(x, y)
    assert measured["hypergradient_norm"] == pytest.approx(np.linalg.norm(task.hypergradient(x)))
    assert measured["lower_gap"] == pytest.approx(np.linalg.norm(y - task.solution(x)))


def test_strong_convexity_holds_and_is_attained(task: QuadraticTask) -> None:
    mu = task.constants(RADIUS).mu
    for i in range(M):
        for d in points(200, Q):
            assert d @ (
                grad_g(task, i, 0, np.r_[np.ones(P), d])[P:] - grad_g(task, i, 0, np.r_[np.ones(P), 0 * d])[P:]
            ) >= (mu * d @ d - 1e-9)
    assert mu == pytest.approx(min(np.linalg.eigvalsh(a.astype(np.float64))[0] for a in task.A))


@pytest.mark.parametrize(("name", "gradient"), [("L_g", grad_g), ("L_f", grad_f)])
def test_gradients_are_lipschitz_and_the_constant_is_attained(
    task: QuadraticTask, name: str, gradient: Any
) -> None:
    constant = getattr(task.constants(RADIUS), name)
    quotients = []
    for i in range(M):
        z = points(1)[0]
        for d in points(100):
            quotients.append(
                np.linalg.norm(gradient(task, i, 0, z + d) - gradient(task, i, 0, z)) / np.linalg.norm(d)
            )
        d = points(1)[0]
        for _ in range(500):  # the power method: d ← H d, up to sign
            d = gradient(task, i, 0, z + d) - gradient(task, i, 0, z)
            d = gradient(task, i, 0, z + d) - gradient(task, i, 0, z)
            d /= np.linalg.norm(d)
        quotients.append(np.linalg.norm(gradient(task, i, 0, z + d) - gradient(task, i, 0, z)))
    assert 0.99 * constant <= max(quotients) <= constant * (1 + 1e-9)


def test_the_upper_losses_are_lipschitz_on_the_ball(task: QuadraticTask) -> None:
    _, _, _, J, c = wide(task)
    most = task.constants(RADIUS).M
    quotients = []
    z = points(300)
    for i in range(M):
        for r in range(ROWS):
            values = 0.5 * np.einsum("ni,ij,nj->n", z, J[i], z) + z @ c[i, r]
            quotients.append(np.max(np.abs(np.diff(values)) / np.linalg.norm(np.diff(z, axis=0), axis=1)))
            gradients = [np.linalg.norm(grad_f(task, i, r, point)) for point in z]
            quotients.append(max(gradients))
    assert 0.5 * most < max(quotients) <= most
    assert most < task.constants(2 * RADIUS).M


def test_second_derivatives_do_not_change(task: QuadraticTask) -> None:
    assert task.constants(RADIUS).rho == 0.0
    z, w, d = points(3)
    for i in range(M):
        one, two = (grad_g(task, i, 0, at + d) - grad_g(task, i, 0, at) for at in (z, w))
        np.testing.assert_allclose(one, two, atol=1e-12)


@pytest.mark.parametrize(("name", "gradient"), [("sigma_1", grad_g), ("sigma_f", grad_f)])
def test_the_deviation_of_one_row_is_bounded_and_attained(task: QuadraticTask, name: str, gradient: Any) -> None:
    sigma = getattr(task.constants(RADIUS), name)
    for z in points(4):
        variances = [
            np.mean([np.sum((gradient(task, i, r, z) - gradient(task, i, None, z)) ** 2) for r in range(ROWS)])
            for i in range(M)
        ]
        assert max(variances) == pytest.approx(sigma**2, rel=1e-6)
    assert 0.5 < sigma < 2.0  # the dial stands at 1.5, with six rows


def test_the_clients_dissimilarity_is_bounded_on_the_ball(task: QuadraticTask) -> None:
    constants = task.constants(RADIUS)
    worst = 0.0
    for z in points(300):
        gradients = np.stack([grad_g(task, i, None, z) for i in range(M)])
        worst = max(worst, np.mean(np.sum((gradients - gradients.mean(0)) ** 2, axis=1)))
    assert 0.25 * constants.sigma_2**2 < worst <= constants.sigma_2**2
    assert constants.sigma_g == max(constants.sigma_1, constants.sigma_2)


def test_heterogeneity_zero_gives_equal_clients_and_more_moves_them_apart() -> None:
    same = Quadratic(size_x=P, size_y=Q, heterogeneity=0.0).make(clients=4, seed=0)
    for array in wide(same):
        np.testing.assert_allclose(array, np.broadcast_to(array[:1], array.shape), atol=1e-7)
    apart = [
        Quadratic(size_x=P, size_y=Q, heterogeneity=h).make(clients=4, seed=0).constants(1.0).sigma_2
        for h in (0.0, 0.3, 1.0, 3.0)
    ]
    assert apart[0] < 1e-6 and apart == sorted(apart) and apart[3] > 2 * apart[1]


def test_noise_averages_to_zero_over_the_rows() -> None:
    made = {
        noise: Quadratic(size_x=P, size_y=Q, noise=noise, rows=ROWS).make(clients=4, seed=0)
        for noise in (0.0, 2.0)
    }
    for name in ("b", "c"):
        exact, noisy = (getattr(made[n], name) for n in (0.0, 2.0))
        np.testing.assert_allclose(noisy.mean(1), exact[:, 0], atol=1e-6)
        assert np.std(exact - exact[:, :1]) == 0 and np.std(noisy - exact) > 0.5


@pytest.mark.parametrize("heterogeneity", [0.0, 5.0])
def test_the_condition_bounds_the_eigenvalues(heterogeneity: float) -> None:
    made = Quadratic(condition=50.0, heterogeneity=heterogeneity).make(clients=6, seed=2)
    values = np.linalg.eigvalsh(made.A.astype(np.float64))
    assert values.min() >= 1 / 50 - 1e-6 and values.max() <= 1 + 1e-6
    assert made.constants(1.0).mu >= 1 / 50 - 1e-6
    if heterogeneity == 0:
        assert values.min() == pytest.approx(1 / 50, abs=1e-6) and values.max() == pytest.approx(1, abs=1e-6)


def test_a_wrong_dial_is_refused_and_the_seed_is_read() -> None:
    with pytest.raises(SettingsError, match="condition"):
        Quadratic(condition=0.5)
    one, again, other = (Quadratic(size_x=2, size_y=2).make(clients=2, seed=s) for s in (0, 0, 1))
    np.testing.assert_array_equal(one.A, again.A)
    assert not np.allclose(one.A, other.A)


def test_a_spec_builds_the_same_problem_with_its_measure() -> None:
    quadratic = Quadratic(size_x=P, size_y=Q)
    task = quadratic.task(DataSettings(name="generated", clients=3), seed=4)
    assert (task.problem.size_x, task.problem.size_y, task.clients.count) == (P, Q, 3)
    expected = quadratic.make(clients=3, seed=4)
    assert task.measure(jnp.zeros(P), jnp.zeros(Q))["hypergradient_norm"] == pytest.approx(
        np.linalg.norm(expected.hypergradient(np.zeros(P)))
    )
