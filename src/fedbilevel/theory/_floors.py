"""Where a method ends on a quadratic problem: the floor that no number of rounds gets below.

On the quadratic the directions of client i are affine, d_i(s) = K_i s + k_i with s = (x, y, v), so the fixed
point of a method on full batches of all clients solves a linear system. With E the step sizes and
W_i = Σ_{k<τ_i} (I - K_i E)^k:

    FedSOBA, FedMSA       mean_i d_i(s) = 0, the stationary point itself
    SimFBO                Σ_i W_i d_i(s) = 0, whatever the server's rate is; ShroFBO divides W_i by τ_i
    FedBiOAcc             Σ_i Σ_{k<τ} D_ik = 0  for the local directions  D_i0 = mean_j d_j(s)  and
                          D_i,k+1 = (I - K_i E) D_ik + ((1-c)^{k+1} - (1-c)^k) (mean_j d_j - d_i)(s)
    Fed-F2SA              both penalised lower problems and the difference of their gradients, in (x, y₊, y₋)
    AggITD, FedNest, ITD  ∇_x f - B̄ᵀ λ Σ_{k<n} (I - λĀ)^k ∇_y f = 0 at y*(x), with n terms of the series
    LFedNest              the same with A_i and B_i of each client inside the mean, and one upper step
    FedAvg                the linear system of its control, with one local step

Minibatches and cohorts add noise around the fixed point of the mean, and leave that point as it is. All of it is
computed in float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..algorithms import AggITD, FedAvg, FedBiOAcc, FedF2SA, FedMSA, FedNest, FedSOBA, LFedNest, NaiveITD
from ..algorithms.local import once
from ..algorithms.simfbo import LocalDirections, ShroFBO
from ..algorithms.single import ThreeVariables
from ..problems import QuadraticTask

Matrix = np.ndarray


def floor_of(task: QuadraticTask, method: Any) -> float | None:
    """||∇f(x)|| at the fixed point of a method on a quadratic problem; None if the point is not known."""
    point = fixed_point(task, method)
    return None if point is None else float(np.linalg.norm(task.hypergradient(point[: task.size_x])))


def fixed_point(task: QuadraticTask, method: Any) -> Matrix | None:
    """The fixed point of a method, which begins with x and y; None if it is not known."""
    if isinstance(method, FedF2SA):
        return _penalised(task, method.nu, symmetric=method.difference == "symmetric")
    if isinstance(method, FedAvg):
        return _control(task, method.control) if once(method.tau) else None
    if isinstance(method, ThreeVariables):
        return _single_loop(task, method)
    if isinstance(method, AggITD | FedNest | LFedNest | NaiveITD) and _solves_lower(method):
        return _by_series(task, method)
    return None


def _single_loop(task: QuadraticTask, method: Any) -> Matrix | None:
    K, k = task.affine_directions
    p, q = task.size_x, task.size_y
    E = np.repeat(np.asarray(method.rates, np.float64), [p, q, q])
    if isinstance(method, LocalDirections):
        steps = method.tau if isinstance(method.tau, tuple) else (method.tau,) * len(K)
        return local_fixed_point(K, k, E, steps, normalised=isinstance(method, ShroFBO))
    if isinstance(method, FedBiOAcc):
        return momentum_fixed_point(K, k, E, method.tau, method.renewal)
    exact = isinstance(method, FedSOBA | FedMSA)
    return np.asarray(-np.linalg.solve(K.mean(0), k.mean(0))) if exact else None


def local_fixed_point(K: Matrix, k: Matrix, E: Matrix, steps: Sequence[int], *, normalised: bool) -> Matrix:
    """The s with Σ_i W_i (K_i s + k_i) = 0; `normalised` divides W_i by the client's number of steps."""
    one = np.eye(K.shape[1])
    left, right = np.zeros_like(one), np.zeros(len(one))
    for tau, matrix, vector in zip(steps, K, k, strict=True):
        W = sum(np.linalg.matrix_power(one - matrix * E, j) for j in range(tau)) / (tau if normalised else 1)
        left, right = left + W @ matrix, right - W @ vector
    return np.asarray(np.linalg.solve(left, right))


def momentum_fixed_point(K: Matrix, k: Matrix, E: Matrix, tau: int, c: float) -> Matrix:
    """The s with Σ_i Σ_{k<τ} D_ik = 0. Each D_ik is a matrix times mean_j d_j(s) and another times d_i(s)."""
    one, mean, offset = np.eye(K.shape[1]), K.mean(0), k.mean(0)
    left, right = np.zeros_like(one), np.zeros(len(one))
    for matrix, vector in zip(K, k, strict=True):
        shared, own = one, np.zeros_like(one)
        for step in range(tau):
            left = left + shared @ mean + own @ matrix
            right = right - shared @ offset - own @ vector
            less = ((1 - c) ** (step + 1) - (1 - c) ** step) * one
            shared, own = (one - matrix * E) @ shared + less, (one - matrix * E) @ own - less
    return np.asarray(np.linalg.solve(left, right))


def _penalised(task: QuadraticTask, nu: float, *, symmetric: bool) -> Matrix:
    """(x, y) of the fixed point of the two lower problems and of the difference, from (x, y₊, y₋)."""
    A, B, b, J, c = task.means
    p, q = task.size_x, task.size_y
    zero, low, half = np.zeros((q, q)), -nu if symmetric else 0.0, 0.5 if symmetric else 1.0
    rows = [
        [J[:p, :p], half * (J[:p, p:] + B.T / nu), (1 - half) * J[:p, p:] - half / nu * B.T],
        [B + nu * J[p:, :p], A + nu * J[p:, p:], zero],
        [B + low * J[p:, :p], zero, A + low * J[p:, p:]],
    ]
    found = -np.linalg.solve(np.block(rows), np.concatenate([c[:p], b + nu * c[p:], b + low * c[p:]]))
    x, plus, minus = np.split(found, [p, p + q])
    return np.concatenate([x, (plus + minus) / 2 if symmetric else minus])


def _control(task: QuadraticTask, control: str) -> Matrix:
    """The (x, y) to which a control goes. A variable that it does not move is zero, as it began."""
    A, B, b, J, c = task.means
    p, q = task.size_x, task.size_y
    if control == "joint":
        both = np.block([[np.zeros((p, p)), B.T], [B, A]]) + J
        return np.asarray(-np.linalg.solve(both, np.concatenate([np.zeros(p), b]) + c))
    if control == "lower-only":
        return np.concatenate([np.zeros(p), task.solution(np.zeros(p))])
    if control == "upper-only":
        return np.concatenate([-np.linalg.solve(J[:p, :p], c[:p]), np.zeros(q)])
    return np.asarray(-np.linalg.solve(np.block([[J[:p]], [B, A]]), np.concatenate([c[:p], b])))


def _solves_lower(method: Any) -> bool:
    """Whether y*(x) is a fixed point of the lower rounds: several uncorrected local steps drift."""
    return method.lower_solver != "sgd" or once(method.lower_steps or 0)


def _by_series(task: QuadraticTask, method: Any) -> Matrix | None:
    """The (x, y*(x)) at which the estimate of the hypergradient by a series is zero."""
    if getattr(method, "estimator", None) == "cg":
        return np.concatenate([task.stationary_point, task.solution(task.stationary_point)])
    if getattr(method, "mode", "paper") != "paper":
        return None
    own = isinstance(method, LFedNest)
    if own and not once(method.upper_steps):
        return None
    terms = method.N + (1 if isinstance(method, AggITD) else 0)
    terms = method.T + (1 if own else 0) if isinstance(method, FedNest | LFedNest) else terms
    A, B, J, c = (a.astype(np.float64) for a in (task.A, task.B, task.J, task.c.mean(1)))
    if not own:
        A, B, J, c = (a.mean(0, keepdims=True) for a in (A, B, J, c))

    def estimate(x: Matrix) -> Matrix:
        z, total = np.concatenate([x, task.solution(x)]), np.zeros(task.size_x)
        for a, mixed, second, first in zip(A, B, J, c, strict=True):
            gradient = second @ z + first
            series, term = np.zeros(task.size_y), gradient[task.size_x :]
            for _ in range(terms):
                series, term = series + method.lam * term, term - method.lam * a @ term
            total += (gradient[: task.size_x] - mixed.T @ series) / len(A)
        return total

    offset = estimate(np.zeros(task.size_x))
    slope = np.stack([estimate(e) - offset for e in np.eye(task.size_x)], axis=1)
    x = -np.linalg.solve(slope, offset)
    return np.concatenate([x, task.solution(x)])
