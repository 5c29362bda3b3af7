"""Runs beside the bound of Theorem 1, computed densely and by the federation."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import rng
from ...algorithms import AggITD
from ...engines import Engine, Simulation
from ...federation import Federation
from ...problems.quadratic import Quadratic, QuadraticTask
from ...theory import Theory
from ._fit import slope
from ._sampling import Array, lower_map, wide

TAU = 3  # the number of local steps at both levels in the convergence study


def gentle_task() -> QuadraticTask:
    """Make a quadratic on which the theorem's small steps make progress within some thousand iterations.

    It has κ_g = 1.2 and a small upper loss.
    """
    made = Quadratic(size_x=4, size_y=3, condition=1.2, heterogeneity=0.5, noise=0.2).make(clients=4, seed=0)
    unit, small, half = np.eye(7, dtype=np.float32), np.float32(0.1), np.float32(0.5)
    return QuadraticTask(made.A, half * made.B, made.b, small * half * (made.J + unit), small * made.c)


def convergence_study(quick: bool) -> dict[str, Any]:
    """Measure 1/K Σ_k ||∇f(x_k)||² with the theorem's step sizes and compare it with the bound.

    Every K is a separate run, because the step sizes depend on K.
    """
    task, N = gentle_task(), 6
    engine = Simulation(task.problem, task.clients)
    lam = 0.25 / task.constants(0.0).L_g
    free = Theory(task.constants(1.0), N, lam)
    least = min(free.alpha_bar_1, free.alpha_bar_2, free.alpha_bar_3)
    alpha_bar = 10 * least  # The rule ᾱ/√K takes over at K = 100.
    start = _start(task, free)
    rows: list[dict[str, Any]] = []
    lengths = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)[: 6 if quick else 8]
    longest = 30 if quick else 1000  # The federation runs no longer than this.
    for K in lengths:
        # With ρ = 0 the step sizes do not depend on the ball, so they are known before the run.
        theory = Theory(task.constants(1.0), N, lam, K, alpha_bar)
        runs = dense_descent(task, theory, TAU, K, seeds=8)
        own = federated_descent(task, engine, theory, TAU, K) if longest >= K else None
        radius = max(runs.radius, own.radius if own else 0.0)
        theory = Theory(task.constants(radius), N, lam, K, alpha_bar)
        bound, used = theory.convergence_bound(start), theory.convergence_bound(start, at_beta=True)
        rows.append(
            {
                "K": K,
                "alpha": theory.alpha_k,
                "beta": theory.beta_k,
                "radius": radius,
                "dense": float(runs.means.mean()),
                "dense_deviation": float(runs.means.std()),
                "federated": float(own.means[0]) if own else None,
                "bound": bound.total,
                "bound_at_beta": used.total,
                "dominant": bound.dominant,
                "terms": bound._asdict(),
            }
        )
    late = rows[-4:]
    return {
        "rows": rows,
        "start": start,
        "alpha_bar": alpha_bar,
        "N": N,
        "lam": lam,
        "slope_measured": slope([r["K"] for r in late], [r["dense"] for r in late]),
        "slope_bound": slope([r["K"] for r in late], [r["bound"] - r["terms"]["truncation"] for r in late]),
        "looseness": [r["bound"] / r["dense"] for r in rows],
    }


def _start(task: QuadraticTask, theory: Theory) -> float:
    """Return W⁰ - inf f at x = 0, y = 0."""
    _, _, _, J, c = wide(task)

    def value(x: Any) -> float:
        z = np.concatenate([x, task.solution(x)])
        return float(0.5 * z @ J.mean(0) @ z + c.mean((0, 1)) @ z)

    zero = np.zeros(task.size_x)
    gap = float((task.solution(zero) ** 2).sum())
    return value(zero) - value(task.stationary_point) + theory.M_f / theory.L_y * gap


class Descent(NamedTuple):
    """Runs of FBO-AggITD: 1/K Σ_k ||∇f(x_k)||² of each, and the largest ||(x, y)|| on the way."""

    means: Array
    radius: float


def dense_descent(task: QuadraticTask, theory: Theory, tau: int, K: int, seeds: int) -> Descent:
    """Run FBO-AggITD from zero with the theorem's step sizes, `seeds` runs side by side.

    Every draw takes one row of each client. The arithmetic is the federation's, in float64 and without messages,
    so that K may be larger than a federation can run.
    """
    A, B, b, J, c = wide(task)
    (m, rows, q), p, N, lam = b.shape, task.size_x, theory.N, theory.lam
    g = rng.generator(0, "theory", "descent", K)
    P, U = lower_map(A, theory.beta_k, tau), lower_map(J[:, :p, :p], theory.alpha_k, tau)
    shrink = np.eye(q) - lam * A.mean(0)
    powers = np.stack([lam * (N + 1) * np.linalg.matrix_power(shrink, N - Q) for Q in range(N + 1)])
    A_m, B_m, b_m, J_m, c_m = A.mean(0), B.mean(0), b.mean((0, 1)), J.mean(0), c.mean((0, 1))
    slope = np.stack([task.hypergradient(e) for e in np.eye(p)]) - task.hypergradient(np.zeros(p))
    offset = task.hypergradient(np.zeros(p))
    x, y, total, radius = np.zeros((seeds, p)), np.zeros((seeds, q)), np.zeros(seeds), 0.0
    b_rows, c_rows, clients = b - b.mean(1, keepdims=True), c - c.mean(1, keepdims=True), np.arange(m)
    for _ in range(K):
        total += ((x @ slope + offset) ** 2).sum(1)
        noise_b = b_rows[clients, g.integers(rows, size=(N, seeds, m))].mean(2)
        noise_c = c_rows[clients, g.integers(rows, size=(2, seeds, m))].mean(2)
        Q = g.integers(N + 1, size=seeds)
        start, constant = y, x @ B_m.T + b_m
        for t in range(N):
            y = y - (y @ A_m + constant + noise_b[t]) @ P.T
            start = np.where((t < Q)[:, None], y, start)
        z = np.concatenate([x, start], 1) @ J_m[:, p:] + c_m[p:] + noise_c[0, :, p:]
        direct = np.concatenate([x, y], 1) @ J_m[:, :p] + c_m[:p] + noise_c[1, :, :p]
        x = x - (direct - np.einsum("sij,sj->si", powers[Q], z) @ B_m) @ U.T
        radius = max(radius, float(np.sqrt((x**2).sum(1) + (y**2).sum(1)).max()))
    return Descent(total / K, radius)


def federated_descent(task: QuadraticTask, engine: Engine, theory: Theory, tau: int, K: int) -> Descent:
    """Do one such run with the library's own FBO-AggITD on the engine of a federation."""
    algorithm = AggITD(
        N=theory.N,
        lam=theory.lam,
        alpha=theory.alpha_k,
        beta=theory.beta_k,
        participation=1.0,
        lower_steps=tau,
        upper_steps=tau,
        share_steps=True,
        batch_zeta=1,
        batch_xi=1,
        batch_zeta_local="full",  # The noise of a quadratic cancels in a local step.
    )
    fed = Federation(engine, seed=K)
    state, total, radius = algorithm.init(task.problem), 0.0, 0.0
    for _ in range(K):
        total += float((task.hypergradient(state.x) ** 2).sum())
        state = algorithm.step(fed, state)
        radius = max(radius, float(np.hypot(np.linalg.norm(state.x), np.linalg.norm(state.y))))
    return Descent(np.array([total / K]), radius)
