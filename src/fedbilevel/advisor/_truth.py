"""The hypergradient at a point to a tolerance, with full batches: what the estimate of a method is compared with.

    y ← y - (∇²_y g)^{-1} ∇_y g        Newton steps, until ∇_y g is small; y can also be left as it is
    h = ∇_x f - ∇_x∇_y g p             with  ∇²_y g p = ∇_y f

Both systems are solved by conjugate gradients, in the form of Lanczos (`_lanczos.py`), with one round a product.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax.numpy as jnp
import numpy as np

from ..steps import Sample
from ._lanczos import Measured, Vector, lanczos
from ._steps import Gradients, Point, mixed_product, start_gradients

NEWTON = 20  # the most Newton steps
FORCING = 0.01  # the tolerance of their systems, which need not be exact as long as y is far from the solution
SOLVED = 0.01  # A gradient that is smaller than this share of the first one is that of a solution.
HALVINGS = 8  # how often a Newton step is shortened before y is left where it is


@dataclass(frozen=True)
class Truth:
    """The hypergradient at a point.

    h          ∇_x f - ∇_x∇_y g p, the sum of the next two
    direct     ∇_x f
    implicit   -∇_x∇_y g p
    p          (∇²_y g)^{-1} ∇_y f
    y          the lower variable at which all of it is taken
    residual   ||∇²_y g p - ∇_y f|| / ||∇_y f||
    lower      ||∇_y g(x, y)||
    solved     whether y was solved for: `lower` is small beside the ||∇_y g|| that the point began with
    measured   the curvature at the point
    """

    h: Vector
    direct: Vector
    implicit: Vector
    p: Vector
    y: Vector
    residual: float
    lower: float
    solved: bool
    measured: Measured


def gradients(point: Point) -> Gradients:
    """∇_y g, ∇_y f and ∇_x f at a point, on full batches."""
    found: Gradients = point.ask(start_gradients, zeta=Sample("lower"), xi=Sample("upper"))
    return found


def true_hypergradient(point: Point, *, solve: bool, tolerance: float, most: int, seed: int) -> Truth:
    """The hypergradient at x, and at the y of the point or at the solution of the lower problem.

    solve      whether Newton steps bring y to the solution first
    tolerance  for the residuals of both systems, and for ∇_y g relative to its first value
    most       the most products for one system
    """
    at = gradients(point)
    if not solve:
        return hypergradient_at(point, at, tolerance=tolerance, most=most, seed=seed)
    start = float(np.linalg.norm(np.asarray(at.q, np.float64)))
    point, at = newton(point, at, tolerance=tolerance, most=most, seed=seed)
    truth = hypergradient_at(point, at, tolerance=tolerance, most=most, seed=seed)
    return replace(truth, solved=truth.lower <= SOLVED * start)


def hypergradient_at(point: Point, at: Gradients, *, tolerance: float, most: int, seed: int) -> Truth:
    """The hypergradient at a point whose gradients are known, and at its y."""
    measured = lanczos(point, np.asarray(at.r), most=most, tolerance=tolerance, seed=seed)
    p = measured.solution()
    mixed = point.ask(mixed_product, v=jnp.asarray(p, jnp.float32), chi=Sample("lower")).w
    direct, implicit = np.asarray(at.d, np.float64), -np.asarray(mixed, np.float64)
    return Truth(
        h=direct + implicit,
        direct=direct,
        implicit=implicit,
        p=p,
        y=np.asarray(point.y),
        residual=measured.solving.residual,
        lower=float(np.linalg.norm(np.asarray(at.q, np.float64))),
        solved=False,
        measured=measured,
    )


def newton(
    point: Point, at: Gradients, *, tolerance: float, most: int, seed: int, steps: int = NEWTON
) -> tuple[Point, Gradients]:
    """Newton steps on the lower problem. A step that does not make ∇_y g smaller is halved, and at last left."""
    first = size = float(np.linalg.norm(np.asarray(at.q, np.float64)))
    for _ in range(steps):
        if size <= tolerance * first or size == 0.0:
            break
        step = lanczos(point, np.asarray(at.q), most=most, tolerance=max(tolerance, FORCING), seed=seed).solution()
        for _ in range(HALVINGS):
            moved = point.moved(y=jnp.asarray(np.asarray(point.y, np.float64) - step, jnp.float32))
            there = gradients(moved)
            new = float(np.linalg.norm(np.asarray(there.q, np.float64)))
            if new < size:
                break
            step = step / 2
        else:
            return point.moved(y=point.y), at
        stalled = new > 0.99 * size
        point, at, size = moved, there, new
        if stalled:  # what is left is the rounding of float32
            break
    return point, at
