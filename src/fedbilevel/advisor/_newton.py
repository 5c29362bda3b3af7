"""The upper quasi-Newton step, from the same secants of the hypergradient as the step size α.

Every outer iteration gives a pair (x_k - x_{k-1}, h_k - h_{k-1}), and the last `LENGTH` pairs with positive
curvature give an approximation M of the inverse Hessian of F(x) = f(x, y*(x)) (`algorithms/secants.py`). The
next x is

    x + t d        with  d = -M h  and  t = min(1, R / ||d||)

in place of x - α h. It costs no round and needs no value of F. Three things keep it safe.

A trust radius R. The model of the step s = t d says that h changes by κ = 1 times -t h along s, and the next
hypergradient tells what it did change by:  κ = sᵀ(h_{k+1} - h_k) / (-t sᵀh_k).

    κ > 2        the curvature is more than twice that of the model; R becomes half of ||s||
    κ ≥ 1/2      the model is right; R becomes at least 2 ||s||
    otherwise    the model does not know this direction, or F is not convex; R shrinks to a quarter, but not
                 below 2 ||s||

A feasible set. The gradient step x - α h, projected, lies on a face of the set. In the directions of this face
the step is d, from the parts of h and of the pairs along it; in all others it is the gradient step. The sum is
projected. (For a box this is the two-metric projection of Bertsekas, "Projected Newton methods for optimization
problems with simple constraints", 1982.) A set that does not know its tangent directions has gradient steps only.

A y that follows x. A pair of hypergradients at a y that lags behind measures the lag, so this step is used only
with a method whose lower rounds end by their residual (`memory` of FBO-AggITD).
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..algorithms.aggitd import AggITD
from ..algorithms.local import once
from ..algorithms.secants import has_pairs, no_pairs, quasi_newton, with_pair
from ..feasible import Region
from ..problem import BilevelProblem
from ._lanczos import Vector
from ._upper import is_short

LENGTH = 10
FLAT = 1e-3  # A pair with less curvature, relative to its lengths, is not used.
DESCENT = 1e-6  # the same for the slope of a direction
TOO_CURVED, AS_CURVED = 2.0, 0.5
GROWTH, SHRINKAGE, HALF = 2.0, 0.25, 0.5


def steps_by_pairs(algorithm: Any, problem: BilevelProblem) -> bool:
    """Whether a method whose hypergradient is exact can have quasi-Newton steps of x."""
    return isinstance(algorithm, AggITD) and algorithm.remembers(problem) and once(algorithm.upper_steps)


def learn(memory: MutableMapping[str, Vector], alpha: float, x: Vector, h: Vector) -> None:
    """Take the pair of this iteration and the last one, whose x and h the memory has, and judge the last step.

    If α is smaller than the memory left it, the run has gone back after a divergence, and everything is forgotten.
    """
    x, h = np.asarray(x, np.float64), np.asarray(h, np.float64)
    R, t, left = (float(each) for each in memory.get("trust", (np.inf, 0.0, 0.0)))
    if "pairs" not in memory or alpha < left * (1 - 1e-6):
        memory["pairs"], R, t = no_pairs(LENGTH, x.size).ravel(), np.inf, 0.0
        memory["trust"] = np.asarray([R, t, left], np.float32)
    if is_short(memory, x):
        return
    s, w = x - memory["x"], h - memory["h"]
    if t > 0:
        length, expected = float(np.linalg.norm(s)), -t * float(s @ memory["h"])
        curved = float(s @ w) / expected if expected > 0 else np.inf
        if curved > TOO_CURVED:
            R = HALF * length
        elif curved >= AS_CURVED:
            R = max(R if np.isfinite(R) else 0.0, GROWTH * length)
        else:
            R = max(SHRINKAGE * R if np.isfinite(R) else 0.0, GROWTH * length)
    pairs = memory["pairs"].reshape(2, LENGTH, x.size)
    memory["pairs"] = with_pair(pairs, s, w).ravel()
    memory["trust"] = np.asarray([R, t, left], np.float32)


def improved(memory: MutableMapping[str, Vector], alpha: float, x: Vector, h: Vector, region: Region) -> Vector:
    """The next x, after `learn`. α is the step size of the gradient steps."""
    x, h = np.asarray(x, np.float64), np.asarray(h, np.float64)
    near = region.nearest(jnp.asarray(x - alpha * h, jnp.float32))
    R = float(memory["trust"][0])
    if region.project is not None and region.tangent is None:
        memory["trust"] = np.asarray([R, 0.0, alpha], np.float32)
        return np.asarray(near)

    def along(vectors: Vector) -> Vector:
        if region.tangent is None:
            return vectors
        given = jnp.asarray(vectors, jnp.float32)
        return np.asarray(jax.vmap(lambda v: region.along(near, v))(given), np.float64)

    g = along(h[None])[0]
    pairs = along(memory["pairs"].reshape(2 * LENGTH, x.size)).reshape(2, LENGTH, x.size)
    d = -along(quasi_newton(pairs, g, None, FLAT)[None])[0] if has_pairs(pairs, FLAT) else -alpha * g
    if not d @ g < -DESCENT * np.linalg.norm(d) * np.linalg.norm(g):
        d = -alpha * g
    length = float(np.linalg.norm(d))
    t = min(1.0, R / length) if length > 0 else 0.0
    memory["trust"] = np.asarray([R, t, alpha], np.float32)
    return np.asarray(region.nearest(jnp.asarray(x - alpha * (h - g) + t * d, jnp.float32)))
