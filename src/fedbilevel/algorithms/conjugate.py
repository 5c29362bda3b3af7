"""Conjugate gradients at the server, for systems whose matrix only the clients can multiply by."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import FedBilevelWarning

GROWN = 1e3  # Beyond this multiple of the smallest residual so far, the products cannot be those of one matrix.


def solve(
    product: Callable[[Array], Array],
    b: Array,
    start: Array,
    image: Array | None,
    steps: int,
    tolerance: float,
    precondition: Callable[[np.ndarray], np.ndarray] = lambda r: r,
) -> Array:
    """p with H p ≈ b, by at most this many products with H, from a start whose image H p is known or zero.

    `precondition` multiplies by an approximation of H^{-1}, which must be symmetric and positive definite.

    It ends when ||b - H p|| ≤ tolerance ||b||. The residual of conjugate gradients may grow on its way, so the p
    with the smallest one is returned. If a direction has no positive curvature, or the residual is GROWN times the
    smallest one, H is not positive definite or its products are too noisy: it ends there, with a warning.

    Replies of zeros are not taken as a solution. A rehearsal has them, and then counts the most rounds.
    """
    b_, p = np.asarray(b, np.float64), np.asarray(start, np.float64)
    r = b_ if image is None else b_ - np.asarray(image, np.float64)
    if not np.linalg.norm(r) <= np.linalg.norm(b_):  # x has moved so far that the start is worse than none
        p, r = np.zeros_like(b_), b_
    z = precondition(r)
    d, best, smallest, enough = z, p, np.linalg.norm(r), tolerance * np.linalg.norm(b_)
    for taken in range(1, steps + 1):
        if enough > 0 and np.linalg.norm(r) <= enough:
            break
        w = np.asarray(product(jnp.asarray(d, jnp.float32)), np.float64)
        square, curvature = r @ z, d @ w
        if square > 0 and not curvature > 0:
            _tell(taken, f"a direction has the curvature {curvature / (d @ d):.3g}")
            break
        rate = square / curvature if square > 0 else 0.0
        p, r = p + rate * d, r - rate * w
        size = np.linalg.norm(r)
        if not size <= GROWN * smallest:
            _tell(taken, f"the residual grew to {size / smallest:.3g} times the smallest one")
            break
        if size < smallest:
            best, smallest = p, size
        z = precondition(r)
        d = z + (r @ z / square if square > 0 else 0.0) * d
    return jnp.asarray(best, jnp.float32)


def _tell(taken: int, why: str) -> None:
    text = (
        f"conjugate gradients ended after {taken} products: {why}; the lower loss must be strongly convex in y, "
        "and batch_u = 'full' gives products of one matrix"
    )
    warnings.warn(text, FedBilevelWarning, stacklevel=3)
