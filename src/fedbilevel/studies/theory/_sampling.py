"""Measurements of the AggITD estimator on a quadratic, beside the bounds of Propositions 1 and 2.

Everything is computed densely, in float64 NumPy. The rows of a quadratic client differ by additive noise only, so
in One-Round-Lower the noise of the local steps cancels and one round is affine in y:

    y⁺ = y - P q,    q = Āy + B̄x + mean_i b_{i,r_i},    P = 1/m Σ_i β/τ Σ_{v<τ} (I - β/τ A_i)^v

The index Q is enumerated. Noise is drawn: there are `trials` trajectories, and every gradient of a client takes
one row. The constants M and σ_2 are those of a ball that covers every iterate that was drawn. Without noise one
trajectory is exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from ... import rng
from ...problems.quadratic import Quadratic, QuadraticTask
from ...theory import Theory

Array = np.ndarray[Any, np.dtype[np.float64]]


class Dials(NamedTuple):
    """The settings of the estimator: β_i = β/τ, α_i = α/τ."""

    N: int
    lam: float
    beta: float
    tau: int = 1
    alpha: float = 0.1


@dataclass(frozen=True)
class Comparison:
    """A measured quantity and the paper's bound on it."""

    name: str
    measured: float
    bound: float

    @property
    def ratio(self) -> float:
        """measured / bound; at most 1 when the bound holds."""
        return self.measured / self.bound if self.bound else float("inf") if self.measured else 0.0


class Case(NamedTuple):
    """A quadratic, the point at which the estimator starts, and its settings."""

    task: QuadraticTask
    x: Array
    y: Array
    dials: Dials


class Sampled(NamedTuple):
    """Drawn trajectories y (T, N+1, q), and the noise of ∇_y f at each t and of ∇_x f at the end."""

    y: Array
    noise_y: Array
    noise_x: Array


def random_case(seed: int) -> Case:
    """Make a random quadratic with random dials that satisfy the propositions' conditions."""
    g = rng.generator(seed, "theory", "case")
    quadratic = Quadratic(
        size_x=int(g.integers(2, 9)),
        size_y=int(g.integers(2, 9)),
        condition=float(np.exp(g.uniform(0, np.log(50)))),
        heterogeneity=float(g.choice([0.0, 0.3, 1.0, 3.0])),
        noise=float(g.choice([0.0, 0.3, 1.0])),
    )
    task = quadratic.make(clients=int(g.integers(2, 11)), seed=seed)
    L_g = task.constants(0.0).L_g
    lam = g.uniform(0.1, 1.0) / L_g
    beta = g.uniform(0.1, 1.0) * min(1.0, lam, 1 / (6 * L_g))
    dials = Dials(int(g.integers(1, 31)), lam, beta, int(g.integers(1, 9)), g.uniform(0.01, 1.0))
    x, y = g.normal(size=quadratic.size_x), 2.0 * g.normal(size=quadratic.size_y)
    return Case(task, x, y, dials)


def hard_case(N: int) -> Case:
    """Make a case whose bias and variance are within a small factor of the bounds.

    It has one client and one dimension, and the estimator starts at y*. A = μ = 0.1, B = 1, λ = 1/L_g, and f is
    close to linear. The bias is its truncation alone, which Proposition 1 bounds by four times itself, and the
    variance tends to half of σ_h² as N grows.
    """
    shape = (1, 1, 1)
    A, B, b = np.full(shape, 0.1), np.ones(shape), np.zeros(shape)
    J, c = 1e-4 * np.eye(2)[None], np.array([[[0.0, 1.0]]])
    task = QuadraticTask(*(a.astype(np.float32) for a in (A, B, b, J, c)))
    lam = 1 / task.constants(0.0).L_g
    return Case(task, np.zeros(1), np.zeros(1), Dials(N, lam, lam / 6))


def wide(task: QuadraticTask) -> tuple[Array, Array, Array, Array, Array]:
    """Return A, B, b, J, c of every client in float64."""
    return (
        task.A.astype(float),
        task.B.astype(float),
        task.b.astype(float),
        task.J.astype(float),
        task.c.astype(float),
    )


def lower_map(A: Array, beta: float, tau: int) -> Array:
    """Return P = 1/m Σ_i β/τ Σ_{v<τ} (I - β/τ A_i)^v."""
    step, unit = beta / tau, np.eye(A.shape[1])
    total = power = np.broadcast_to(unit, A.shape)
    for _ in range(tau - 1):
        power = power @ (unit - step * A)
        total = total + power
    return np.asarray(step * total.mean(0))


def sample(case: Case, trials: int, seed: int) -> Sampled:
    """Draw trajectories of the lower loop and the noise of the upper gradients, with one row for every client."""
    A, B, b, _, c = wide(case.task)
    m, rows, _ = b.shape
    N, p = case.dials.N, case.task.size_x
    g = rng.generator(seed, "theory", "noise")

    def noise(values: Array, count: int) -> Array:
        chosen = g.integers(rows, size=(trials, count, m))
        return np.asarray((values - values.mean(1, keepdims=True))[np.arange(m), chosen].mean(2))

    P, drawn = lower_map(A, case.dials.beta, case.dials.tau), noise(b, N)
    offset = B.mean(0) @ case.x + b.mean((0, 1))
    y = np.empty((trials, N + 1, case.y.size))
    y[:, 0] = case.y
    for t in range(N):
        y[:, t + 1] = y[:, t] - (y[:, t] @ A.mean(0) + offset + drawn[:, t]) @ P.T
    return Sampled(y, noise(c[:, :, p:], N + 1), noise(c[:, :, :p], 1))


def products(case: Case, drawn: Sampled, *, noisy: bool) -> Array:
    """Return λ (N+1) (I - λĀ)^{N-Q} ∇_y f(x, y^Q) for every trajectory and every Q, of shape (T, N+1, q)."""
    A, _, _, J, c = wide(case.task)
    N, lam, p = case.dials.N, case.dials.lam, case.task.size_x
    value = _upper_gradient(case, drawn.y, J, c)[..., p:] + (drawn.noise_y if noisy else 0.0)
    shrink = np.eye(A.shape[1]) - lam * A.mean(0)
    powers = np.stack([np.linalg.matrix_power(shrink, N - Q) for Q in range(N + 1)])
    return np.asarray(lam * (N + 1) * np.einsum("nij,tnj->tni", powers, value))


def bias(case: Case, drawn: Sampled) -> float:
    """Return B^I: the mean over trajectories of ||E[h^I] - ∇_x∇_y g (∇²_y g)^{-1} ∇_y f(x, y^N)||².

    The expectation is over Q and the samples. The paper conditions on y^N alone, and by Jensen's inequality its
    bias is no larger.
    """
    A, B, _, J, c = wide(case.task)
    exact = _upper_gradient(case, drawn.y[:, -1], J, c)[:, case.task.size_x :] @ np.linalg.inv(A.mean(0))
    return _mean_square((products(case, drawn, noisy=False).mean(1) - exact) @ B.mean(0))


def variance(case: Case, drawn: Sampled) -> float:
    """Return max_i E||h_i^I - E h_i^I||² over Q, samples and trajectories.

    It is no less than the variance given y^N, which the paper bounds.
    """
    p = products(case, drawn, noisy=True).reshape(-1, case.y.size)
    estimates = [p @ B for B in wide(case.task)[1]]
    return max(_mean_square(h - h.mean(0)) for h in estimates)


def upper_moves(case: Case, drawn: Sampled) -> tuple[float, float]:
    """Return max_{i,v} E||h_i^D(x_v) - h_i^D(x_0) + h^D - h^I||² in One-Round-Upper.

    The second number is the largest ||(x_v, y^N)||.
    """
    _, B, _, J, c = wide(case.task)
    size, tau, last = case.task.size_x, case.dials.tau, drawn.y[:, -1:]
    direct = _upper_gradient(case, last, J, c)[..., :size] + drawn.noise_x
    h = direct - products(case, drawn, noisy=True) @ B.mean(0)
    most, reach = 0.0, 0.0
    for J_x in J[:, :size, :size]:
        S = np.zeros((size, size))  # x_v - x = -S h
        for _ in range(tau):
            left = np.eye(size) - J_x @ S
            most = max(most, _mean_square((h @ left.T).reshape(-1, size)))
            away = np.linalg.norm(case.x - h @ S.T, axis=-1)
            reach = max(reach, float(np.hypot(away, np.linalg.norm(last, axis=-1)).max()))
            S = S + case.dials.alpha / tau * left
    return most, reach


def compare(case: Case, trials: int = 400, seed: int = 0) -> tuple[list[Comparison], Theory]:
    """Measure the propositions' quantities on one case.

    Return each of them beside its bound, and the theory that gave the bounds.
    """
    noise = case.task.constants(0.0)
    exact = max(noise.sigma_f, noise.sigma_1) < 1e-6
    drawn = sample(case, 1 if exact else trials, seed)
    solution = case.task.solution(case.x)
    moved, reach = upper_moves(case, drawn)
    points = np.concatenate([drawn.y.reshape(-1, case.y.size), solution[None]])
    radius = float(np.hypot(np.linalg.norm(case.x), np.linalg.norm(points, axis=1)).max())

    def theory_on(ball: float) -> Theory:
        return Theory(case.task.constants(ball), case.dials.N, case.dials.lam, beta=case.dials.beta)

    theory, wider = theory_on(radius), theory_on(max(radius, reach))  # The upper steps leave the first ball.
    gap = float(((case.y - solution) ** 2).sum())
    gaps = [
        Comparison("lower", _mean_square(drawn.y[:, t] - solution), theory.lower_gap_bound(gap, t))
        for t in range(1, case.dials.N + 1)
    ]
    return [
        Comparison("bias", bias(case, drawn), theory.bias_bound(gap).total),
        Comparison("variance", variance(case, drawn), theory.sigma_h2),
        Comparison("upper", moved, wider.D_h2),
        max(gaps, key=lambda one: one.ratio),
    ], theory


def _upper_gradient(case: Case, y: Array, J: Array, c: Array) -> Array:
    """Return ∇f(x, y) in z = (x, y), for y of any leading shape."""
    z = np.concatenate([np.broadcast_to(case.x, (*y.shape[:-1], case.x.size)), y], axis=-1)
    return np.asarray(z @ J.mean(0) + c.mean((0, 1)))


def _mean_square(rows: Array) -> float:
    return float((rows**2).sum(-1).mean())
