"""How true is the direction in which a method moves x? Its angle to the hypergradient of all clients.

    h(x) = ∇_x f - ∇_x∇_y g p    at  y*(x),  with  ∇²_y g p = ∇_y f

The method is run for some rounds with all clients, so that no cohort is drawn. In some of its outer iterations
the way that x went is compared with -h at the x that it came from. The cosines are averaged with the lengths of
the ways as weights, because the direction says nothing where x has arrived and hardly moves. y*(x) is found by
Newton steps, and both systems are solved by conjugate gradients on all rows of all clients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.scipy.sparse.linalg import cg

from ..batch import Batch
from ..data import Clients, Part
from ..engines import Simulation
from ..errors import SettingsError
from ..federation import Federation
from ..problem import Problem
from ..spec import Spec

ROUNDS = 70  # in which x is followed; an outer iteration of FBO-AggITD with N = 30 has 63
NEWTON = 12  # Newton steps to y*(x)
PRODUCTS = 300  # the most products of the conjugate gradients
LOOKED = 10  # the most outer iterations at which the true hypergradient is computed


class Truth(NamedTuple):
    """The hypergradient, and the length of ∇_y g where it was taken, relative to that of ∇_y f."""

    h: Array
    residual: Array


def cosine_of(spec: Spec) -> float:
    """The mean cosine of the angles between the ways of x and -h, over iterations spread evenly over `ROUNDS`.

    A method that does not move x at all has the cosine 0.
    """
    task = spec.task()
    clients = spec.clients(task)
    if not isinstance(task.problem, Problem) or task.problem.lower_is != "global" or task.problem.own is not None:
        raise SettingsError(
            "the quality of a hypergradient is for a Problem with one lower level and no own variables"
        )
    chosen: Any = spec.algorithm
    method: Any = replace(chosen, participation=1.0)
    fed = Federation(Simulation(task.problem, clients), seed=spec.seed)
    truth, state = true_hypergradient(task.problem, clients), method.init(task.problem, clients.count)
    places = list[tuple[Array, Array, Array]]()
    while fed.ledger.rounds < ROUNDS or not places:
        before, state = state, method.step(fed, state)
        places.append((before.x, before.y, state.x - before.x))
    along = length = 0.0
    for number in np.unique(np.linspace(0, len(places) - 1, LOOKED).round().astype(int)):
        x, y, way = places[number]
        h = truth(x, y).h
        size = float(jnp.linalg.norm(h))
        along += float(-(way @ h)) / size if size > 0 else 0.0
        length += float(jnp.linalg.norm(way))
    return along / length if length > 0 else 0.0


def true_hypergradient(problem: Problem, clients: Clients) -> Callable[[Array, Array], Truth]:
    """A function of x and of a y to start from, which gives h(x)."""
    data = [clients.load(i) for i in range(clients.count)]
    parts = {"lower": stacked([each.lower for each in data]), "upper": stacked([each.upper for each in data])}

    def mean(level: str, x: Array, y: Array) -> Array:
        def one(part: Part, weights: Array) -> Array:
            features = problem.features(x, part.inputs)
            return problem.loss(level, x, y, Batch(part.inputs, part.targets, weights, features))

        return jnp.mean(jax.vmap(one)(*parts[level]))

    @jax.jit
    def truth(x: Array, y: Array) -> Truth:
        def slope(y: Array) -> Array:
            return jax.grad(mean, 2)("lower", x, y)

        def solved(y: Array, b: Array, tolerance: float) -> Array:
            return cg(lambda v: jax.jvp(slope, (y,), (v,))[1], b, tol=tolerance, maxiter=PRODUCTS)[0]

        y = jax.lax.fori_loop(0, NEWTON, lambda _, y: y - solved(y, slope(y), 1e-3), y)
        f_y = jax.grad(mean, 2)("upper", x, y)
        p = solved(y, f_y, 1e-6)
        mixed = jax.grad(lambda x: jnp.vdot(jax.grad(mean, 2)("lower", x, y), p))(x)
        residual = jnp.linalg.norm(slope(y)) / jnp.maximum(jnp.linalg.norm(f_y), 1e-30)
        return Truth(jax.grad(mean, 1)("upper", x, y) - mixed, residual)

    return truth


def stacked(parts: list[Part]) -> tuple[Part, Array]:
    """The rows of several clients as arrays of clients x rows, and weights that are zero for padding."""
    most = max(part.rows for part in parts)

    def together(*arrays: Any) -> Array:
        return jnp.stack(
            [jnp.pad(jnp.asarray(a), ((0, most - len(a)), *((0, 0) for _ in a.shape[1:]))) for a in arrays]
        )

    weights = jnp.stack([(jnp.arange(most) < part.rows).astype(jnp.float32) for part in parts])
    return jax.tree.map(together, *parts), weights
