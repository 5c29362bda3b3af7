"""Pairs (v, H v) that the server has seen, and the quasi-Newton step that they give.

A pair is a direction and what a symmetric matrix H makes of it: a Hessian product of conjugate gradients, or the
difference of two points and of the gradients there. m pairs give an approximation M of H^{-1} by the recursion of
L-BFGS (Nocedal, "Updating quasi-Newton matrices with limited storage", 1980). It begins with a multiple of the
identity; then each pair, the oldest first, changes M so that M H v = v for this pair:

    M ← (I - ρ v wᵀ) M (I - ρ w vᵀ) + ρ v vᵀ        with w = H v and ρ = 1 / vᵀw

Directions of conjugate gradients do not disturb each other in this, so M is exact on the space of the last
solution. (Morales and Nocedal, "Automatic preconditioning by limited memory quasi-Newton updating", 2000, keep
them in this way for the next system.)

Pairs are one array of the shape (2, m, n), so that they can be part of a state: pairs[0] has the directions, which
have unit length, and pairs[1] the products. Zeros are places without a pair, and the newest pair is the last one.
"""

from __future__ import annotations

import numpy as np

Vector = np.ndarray
LENGTH = 40  # the pairs that are kept if the vectors are short
NUMBERS = 10**7  # the most numbers in all directions together
FEWEST = 5
FLAT = 1e-8  # A direction with less curvature than this share of |v| |w| is no pair.


def length_for(size: int) -> int:
    """How many pairs of vectors of this size to keep."""
    return min(LENGTH, max(FEWEST, NUMBERS // max(size, 1)))


def no_pairs(length: int, size: int) -> Vector:
    return np.zeros((2, length, size), np.float32)


def with_pair(pairs: Vector, v: Vector, w: Vector) -> Vector:
    """The pairs with another one, and without the oldest. Without positive curvature, they stay as they are."""
    v, w = np.asarray(v, np.float64), np.asarray(w, np.float64)
    size = np.linalg.norm(v)
    if not (np.all(np.isfinite(w)) and v @ w > FLAT * size * np.linalg.norm(w)):
        return pairs
    added = np.stack([v / size, w / size])[:, None].astype(np.float32)
    return np.concatenate([pairs[:, 1:], added], axis=1)


def quasi_newton(pairs: Vector, g: Vector, scale: float | None, flat: float = FLAT) -> Vector:
    """M g, where M begins with `scale` times the identity, or with that of the newest pair if it is None.

    A pair whose curvature is not above the share `flat` of |v| |w| is left out; none has been added like this,
    but the parts of pairs in a subspace may be so.
    """
    directions, products = np.asarray(pairs, np.float64)
    curvatures = np.einsum("mn,mn->m", directions, products)
    lengths = np.linalg.norm(directions, axis=1) * np.linalg.norm(products, axis=1)
    used = [(directions[k], products[k], 1 / curvatures[k]) for k in np.flatnonzero(curvatures > flat * lengths)]
    result, parts = np.asarray(g, np.float64), list[float]()
    for v, w, rho in reversed(used):
        parts.append(rho * (v @ result))
        result = result - parts[-1] * w
    if scale is None:
        v, w, rho = used[-1]
        scale = float(1 / (rho * (w @ w)))
    result = scale * result
    for v, w, rho in used:
        result = result + (parts.pop() - rho * (w @ result)) * v
    return result


def has_pairs(pairs: Vector, flat: float = FLAT) -> bool:
    """Whether `quasi_newton` would use any of them."""
    directions, products = np.asarray(pairs, np.float64)
    lengths = np.linalg.norm(directions, axis=1) * np.linalg.norm(products, axis=1)
    return bool(np.any(np.einsum("mn,mn->m", directions, products) > flat * lengths))
