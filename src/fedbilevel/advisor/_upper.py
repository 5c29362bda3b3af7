"""The upper step size: from secants of the hypergradient, with no further rounds where that is possible.

Nothing is known beforehand about the curvature of F(x) = f(x, y*(x)): it is not convex in general, and it changes
along the way. (A penalty exp(x) has a curvature that grows and falls with it.) But every outer iteration gives a
hypergradient h_k at its x_k, and so a secant. The rule is that of adaptive gradient descent (Malitsky and
Mishchenko, "Adaptive Gradient Descent without Descent", ICML 2020):

    α_k = min( sqrt(1 + θ_{k-1}) α_{k-1},  ||x_k - x_{k-1}|| / (2 ||h_k - h_{k-1}||) ),      θ_k = α_k / α_{k-1}

with θ_0 = ∞. It begins with a trial, which moves x by `TRIAL` relative to max(1, ||x||) along the hypergradient
that the measurement of the start has found, so that the first iteration has a secant. In an outer iteration h_k is
known only after its step size was needed, so α_k is used one iteration later. It needs no function values and no
rounds. It stays below the inverse of the local curvature, and grows by half in an iteration where that is small.
For convex F with exact hypergradients and without the delay the rule is proved to converge; here it is a
heuristic.

A secant of noisy hypergradients measures their noise. So a method that draws a random Q or T', minibatches for h,
or a part of the clients, has a fixed step size instead: the hypergradient is solved for at x_0 and at two points
along -h, and α = 1 / (2 L) for the larger L of the two secants. In a single-loop method y and v follow x by one
step in an iteration, so α is at most β mu / L there, and the run begins at the trial with the smallest
hypergradient, where y and v are known.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..algorithms import FedF2SA
from ..algorithms.local import SecondDerivatives, rows_of
from ..algorithms.single import SingleState, ThreeVariables
from ..feasible import regions_of
from ._lanczos import Spectrum, Vector
from ._steps import Point
from ._truth import Truth, true_hypergradient

TRIAL = 0.01
NOISE = 1e-4
NOTED = "hypergradient_estimate"
FULL = ("batch_xi", "batch_xi_local", "batch_u", "batch_chi", "batch_zeta")


def is_exact(algorithm: Any, clients: int) -> bool:
    """Whether a method's hypergradient has no noise of its own, so that its secants mean something."""
    if not isinstance(algorithm, SecondDerivatives) or getattr(algorithm, "estimator", "") == "sampled":
        return False
    if not is_everyone(getattr(algorithm, "participation", None), clients):
        return False
    return all(rows_of(getattr(algorithm, name, "full")) is None for name in FULL)


def is_everyone(participation: Any, clients: int) -> bool:
    """Whether a cohort is all clients."""
    return bool(participation == clients if isinstance(participation, int) else participation == 1.0)


def upper_length(algorithm: Any) -> float:
    """How many times the step size an outer iteration moves x along h."""
    if isinstance(algorithm, ThreeVariables):
        return algorithm.reach
    steps = getattr(algorithm, "upper_steps", 1)
    if getattr(algorithm, "share_steps", False):
        return 1.0
    return float(np.mean(steps))


def first_step(algorithm: Any, x: Vector, h: Vector) -> float:
    """The step size of the trial, which moves x by a hundredth of its length, or of one."""
    size = float(np.linalg.norm(np.asarray(h, np.float64)))
    along = TRIAL * max(1.0, float(np.linalg.norm(np.asarray(x, np.float64))))
    return along / size / upper_length(algorithm) if size > 0 else TRIAL


class Trials(NamedTuple):
    """The larger secant of two trials along -h, and the hypergradient at the trial where it is smallest.

    secant   ||h(x') - h(x)|| / ||x' - x||; zero if there is none
    best     the point of it: the start, or one of the trials
    """

    secant: float
    best: Point
    truth: Truth


def try_along(point: Point, truth: Truth, *, tolerance: float, most: int, seed: int) -> Trials:
    """Two trials along -h: one that moves x by `TRIAL`, and one of the length that the first one suggests."""
    x, h = np.asarray(point.x, np.float64), truth.h
    size = float(np.linalg.norm(h))
    found = Trials(0.0, point, truth)
    if size == 0:
        return found
    step = TRIAL * max(1.0, float(np.linalg.norm(x))) / size
    within = regions_of(point.fed.engine.problem).x.nearest
    for _ in range(2):
        there = point.moved(x=within(jnp.asarray(x - step * h, jnp.float32)), y=jnp.asarray(truth.y, jnp.float32))
        moved = float(np.linalg.norm(np.asarray(there.x, np.float64) - x))
        if moved == 0:
            break
        other = true_hypergradient(there, solve=truth.solved, tolerance=tolerance, most=most, seed=seed)
        secant = max(found.secant, float(np.linalg.norm(other.h - h)) / moved)
        better = float(np.linalg.norm(other.h)) < float(np.linalg.norm(found.truth.h))
        found = Trials(secant, there, other) if better else found._replace(secant=secant)
        if not (math.isfinite(secant) and secant > 0):
            break
        step = min(1 / secant, 100 * step)
    return found


def fixed_step(point: Point, tried: Trials, algorithm: Any, pace: float = 0.5) -> float:
    """The step size of a noisy method: one half over the larger secant, or less if y cannot follow."""
    if math.isfinite(tried.secant) and tried.secant > 0:
        return pace / tried.secant
    size = max(float(np.linalg.norm(tried.truth.h)), 1e-30)
    return (
        TRIAL * max(1.0, float(np.linalg.norm(np.asarray(point.x, np.float64)))) / size / upper_length(algorithm)
    )


def pace_of(algorithm: Any, spectrum: Spectrum) -> float:
    """How much of the inverse curvature of f(x, y*(x)) a step of x may be, as a share.

    Half of it in an outer iteration. In a single loop y and v follow x: their slowest error loses a share β mu in
    a step, so x may not go faster than that.
    """
    half = 0.5 / upper_length(algorithm)
    beta = getattr(algorithm, "beta", None)
    if not isinstance(algorithm, ThreeVariables | FedF2SA) or beta is None:
        return half
    return min(half, beta * max(spectrum.mu, 1e-6 * spectrum.safe_L))


def followed(algorithm: Any, state: Any, truth: Truth) -> Any:
    """The state of a single-loop method whose y and v have caught up with its x, where they are known."""
    y, p = (jnp.asarray(a, jnp.float32) for a in (truth.y, truth.p))
    if isinstance(state, SingleState):
        return state._replace(y=y, v=p)
    apart = algorithm.nu * p  # argmin g ± ν f = y* ∓ ν p, up to ν²
    return state._replace(y=y, plus=y - apart, minus=None if state.minus is None else y + apart)


def is_short(memory: Mapping[str, np.ndarray], x: Vector) -> bool:
    """Whether x has moved so little since the last secant that another would measure the rounding of float32."""
    x = np.asarray(x, np.float64)
    return bool(np.linalg.norm(x - memory["x"]) <= NOISE * max(1.0, float(np.linalg.norm(x))))


def adapted(memory: MutableMapping[str, np.ndarray], alpha: float, x: Vector, h: Vector, length: float) -> float:
    """The next step size, after an iteration with the step size α that began at x with the hypergradient h.

    `memory` has the x, the h and the θ of the iteration before, and is changed.
    """
    x, h = np.asarray(x, np.float64), np.asarray(h, np.float64)
    before = dict(memory)
    moved, turned = (np.linalg.norm(now - before.get(name, 0.0)) for name, now in (("x", x), ("h", h)))
    if before and is_short(memory, x):
        return alpha  # the next secant is longer
    memory["x"], memory["h"] = x.astype(np.float32), h.astype(np.float32)
    memory.setdefault("theta", np.asarray([np.inf], np.float32))
    if not before or not np.isfinite(turned):
        return alpha
    theta = float(before["theta"][0])
    growth = math.sqrt(1 + theta) * alpha
    curved = float(moved / (2 * turned) / length) if turned > 0 else math.inf
    new = min(growth, curved)
    if not math.isfinite(new):
        return alpha
    memory["theta"] = np.asarray([new / alpha], np.float32)
    return new
