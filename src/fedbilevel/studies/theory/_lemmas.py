"""Outer iterations of FBO-AggITD beside the bounds of Lemmas 1, 2 and 3.

Everything is computed densely, in float64 NumPy, for many repetitions side by side. A repetition draws Q and one
row of each client for every gradient; expectations are means over the repetitions. As in `_sampling`, the noise of
local steps cancels, so with h = h^D - h^I the local upper iterates of client i are

    x_0^i = x,    x_{v+1}^i = x_v^i - α/τ (h + J_i (x_v^i - x))        J_i = ∇²_x f_i

h̄^I is the mean over Q and rows for the lower iterates that were drawn, as in the paper's formula for h̄.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ... import rng
from ...problems.quadratic import QuadraticTask
from ...theory import Theory
from ._convergence import TAU, gentle_task
from ._sampling import Array, Comparison, Dials, lower_map, random_case, wide

LEMMAS = {
    "descent": "Lemma 1: E f(x⁺) - E f(x)",
    "warm_start": "Lemma 2: E‖y⁺ - y*(x⁺)‖²",
    "drift": "Lemma 3: E‖x_v^i - x‖², largest i and v",
}


class Noise(NamedTuple):
    """The draws of one outer iteration, for every repetition.

    Q      the index at which the Hessian product starts                  (repetitions,)
    lower  the noise of the gradient q in each lower round                (N, repetitions, q)
    start  the noise of ∇_y f at y^Q                                      (repetitions, q)
    end    the noise of ∇_x f at y^N                                      (repetitions, p)
    """

    Q: np.ndarray
    lower: Array
    start: Array
    end: Array


class Moments(NamedTuple):
    """What the lemmas speak of, measured in one outer iteration; see `fedbilevel.theory.LemmaBounds`.

    descent    E f(x⁺) - E f(x)                the left side of Lemma 1
    next_gap   E||y⁺ - y*(x⁺)||²               the left side of Lemma 2
    furthest   max_{i,v} E||x_v^i - x||²       the left side of Lemma 3
    before     E||y - y*(x)||²                 the gap at the start of the lower loop, for Proposition 1
    radius     the largest ||(x, y)|| of all points at which a derivative was taken, and of all y*
    """

    descent: float
    next_gap: float
    furthest: float
    gradient: float
    direction: float
    bias: float
    drift: float
    gap: float
    before: float
    radius: float


def draw_noise(task: QuadraticTask, N: int, repetitions: int, g: np.random.Generator) -> Noise:
    """Draw Q and one row of each client for every gradient of an outer iteration."""
    _, _, b, _, c = wide(task)
    (m, rows, _), p = b.shape, task.size_x

    def noise(values: Array, count: int) -> Array:
        chosen = g.integers(rows, size=(count, repetitions, m))
        return np.asarray((values - values.mean(1, keepdims=True))[np.arange(m), chosen].mean(2))

    upper = noise(c, 2)
    return Noise(g.integers(N + 1, size=repetitions), noise(b, N), upper[0, :, p:], upper[1, :, :p])


def iterate(task: QuadraticTask, dials: Dials, x: Array, y: Array, noise: Noise) -> tuple[Array, Array, Moments]:
    """Do one outer iteration from x and y, which have one row for each repetition; return x⁺, y⁺ and moments."""
    A, B, b, J, c = wide(task)
    A_m, B_m, b_m, J_m, c_m = A.mean(0), B.mean(0), b.mean((0, 1)), J.mean(0), c.mean((0, 1))
    (N, lam, beta, tau, alpha), p = dials, task.size_x
    inverse = np.linalg.inv(A_m)

    def solution(at: Array) -> Array:
        return -(at @ B_m.T + b_m) @ inverse

    def upper_gradient(at: Array, v: Array) -> Array:
        return np.asarray(np.concatenate([at, v], 1) @ J_m + c_m)

    def value(at: Array) -> Array:
        z = np.concatenate([at, solution(at)], 1)
        return np.asarray(((0.5 * z @ J_m + c_m) * z).sum(1))

    path, P = [y], lower_map(A, beta, tau)
    for t in range(N):
        path.append(path[-1] - (path[-1] @ A_m + x @ B_m.T + b_m + noise.lower[t]) @ P.T)
    sources = np.stack([upper_gradient(x, v)[:, p:] for v in path])
    powers = np.stack([np.linalg.matrix_power(np.eye(len(A_m)) - lam * A_m, N - Q) for Q in range(N + 1)])
    mean = lam * np.einsum("nij,nrj->ri", powers, sources) @ B_m
    chosen = sources[noise.Q, np.arange(len(x))] + noise.start
    indirect = lam * (N + 1) * np.einsum("rij,rj->ri", powers[noise.Q], chosen) @ B_m
    end = upper_gradient(x, path[-1])
    h = end[:, :p] + noise.end - indirect

    away, correction, drifts, reach = [], np.zeros_like(x), [], 0.0
    for J_x in J[:, :p, :p]:
        v = np.zeros_like(x)  # x_v^i - x
        for _ in range(tau):
            drifts.append(_mean_square(v))
            reach = max(reach, float(_norms(x + v, path[-1]).max()))
            correction += v @ J_x / (len(J) * tau)
            v = v - alpha / tau * (h + v @ J_x)
        away.append(v)
    moved, star = x + np.mean(away, 0), solution(x)
    slope = upper_gradient(x, star)
    true = slope[:, :p] - slope[:, p:] @ inverse @ B_m
    points = [*path, star]
    return (
        moved,
        path[-1],
        Moments(
            descent=float((value(moved) - value(x)).mean()),
            next_gap=_mean_square(path[-1] - solution(moved)),
            furthest=max(drifts),
            gradient=_mean_square(true),
            direction=_mean_square(end[:, :p] + correction - mean),
            bias=_mean_square(mean - end[:, p:] @ inverse @ B_m),
            drift=float(np.mean(drifts)),
            gap=_mean_square(path[-1] - star),
            before=_mean_square(y - star),
            radius=max(reach, *(float(_norms(x, v).max()) for v in points), float(_norms(moved, star).max())),
        ),
    )


def compare_lemmas(theory: Theory, found: Moments, *, measured_bias: bool) -> list[Comparison]:
    """Put both sides of each lemma beside each other, with B^I as measured or as Proposition 1 bounds it."""
    bias = found.bias if measured_bias else theory.bias_bound(found.before).total
    descent = theory.descent_bound(
        gradient=found.gradient, direction=found.direction, bias=bias, drift=found.drift, gap=found.gap
    )
    warm = theory.warm_start_bound(direction=found.direction, gap=found.gap)
    drift = theory.drift_bound(gap=found.gap, gradient=found.gradient, bias=bias)
    return [
        Comparison("descent", found.descent, descent.total),
        Comparison("warm_start", found.next_gap, warm.total),
        Comparison("drift", found.furthest, drift.total),
    ]


def loss_ratio(theory: Theory, found: Moments) -> float:
    """Return Lemma 1's ratio of both sides, after its two gains were moved to the left. It is at most 1."""
    bound = theory.descent_bound(
        gradient=found.gradient, direction=found.direction, bias=found.bias, drift=found.drift, gap=found.gap
    )
    return (found.descent - bound.gradient - bound.direction) / bound.losses


def lemma_study(quick: bool) -> dict[str, Any]:
    """Follow a run from zero with the theorem's step sizes, and do one iteration on 50 random problems."""
    task, N, K, repetitions = gentle_task(), 6, 60 if quick else 300, 500 if quick else 4000
    lam = 0.25 / task.constants(0.0).L_g
    free = Theory(task.constants(1.0), N, lam, K=1, alpha_bar=1e9)  # α_k is the largest that the theorem allows.
    dials = Dials(N, lam, free.beta_k, TAU, free.alpha_k)
    g = rng.generator(0, "theory", "lemmas")
    x, y = np.zeros((repetitions, task.size_x)), np.zeros((repetitions, task.A.shape[1]))
    course = []
    for _ in range(K):
        x, y, found = iterate(task, dials, x, y, draw_noise(task, N, repetitions, g))
        course.append(found)
    radius = max(found.radius for found in course)
    theory = Theory(task.constants(radius), N, lam, K=1, alpha_bar=1e9)
    rows = []
    for k, found in enumerate(course):
        row: dict[str, Any] = {"k": k, "loss_ratio": loss_ratio(theory, found), **found._asdict()}
        for one in compare_lemmas(theory, found, measured_bias=True):
            row |= {f"{one.name}_left": one.measured, f"{one.name}_right": one.bound}
        for one in compare_lemmas(theory, found, measured_bias=False):
            row[f"{one.name}_restated"] = one.bound
        rows.append(row)
    random = [_random_ratios(seed, repetitions) for seed in range(50)]
    return {
        "rows": [row for row in rows if row["k"] < 20 or row["k"] % 10 == 0 or row["k"] == K - 1],
        "worst_of_run": {
            "descent": max(row["loss_ratio"] for row in rows),
            "warm_start": max(row["warm_start_left"] / row["warm_start_right"] for row in rows),
            "drift": max(row["drift_left"] / row["drift_right"] for row in rows),
        },
        "K": K,
        "repetitions": repetitions,
        "tau": TAU,
        "N": N,
        "lam": lam,
        "alpha": dials.alpha,
        "beta": dials.beta,
        "radius": radius,
        "random": random,
        "worst": {name: max(one[name] for one in random) for name in LEMMAS},
        "median": {name: float(np.median([one[name] for one in random])) for name in LEMMAS},
    }


def _random_ratios(seed: int, repetitions: int) -> dict[str, float]:
    """Return the left side over the right side of each lemma, in one iteration on a random quadratic."""
    task, x, y, dials = random_case(seed)

    def theory_on(ball: float) -> Theory:
        return Theory(task.constants(ball), dials.N, dials.lam, K=1, alpha_bar=1e9, beta=dials.beta)

    dials = dials._replace(alpha=theory_on(1.0).alpha_k)
    noise = draw_noise(task, dials.N, repetitions, rng.generator(seed, "theory", "lemmas"))
    found = iterate(task, dials, np.tile(x, (repetitions, 1)), np.tile(y, (repetitions, 1)), noise)[2]
    theory = theory_on(found.radius)
    sides = compare_lemmas(theory, found, measured_bias=True)
    return {one.name: one.ratio for one in sides} | {"descent": loss_ratio(theory, found)}


def _norms(x: Array, y: Array) -> Array:
    return np.asarray(np.sqrt((x**2).sum(-1) + (y**2).sum(-1)))


def _mean_square(rows: Array) -> float:
    return float((rows**2).sum(-1).mean())
