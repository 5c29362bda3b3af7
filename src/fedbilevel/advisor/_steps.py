"""The client steps of the advisor. They are rounds of the federation, and the ledger has them under their names.

A method with a server lets its cohort hold x and y, and sends a vector a round. A method without a server has no
rounds of this kind, so its agents are measured by probes, which are sent x and y each time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..federation import Federation
from ..oracle import Oracle
from ..steps import Draw, Scalar, Stream, X, Y, client_step, repeat, walk

POWER = 16  # The largest of m numbers is found from the mean of their powers, up to a factor of m^(1/16) = 1.3.
MOST_APART = 100.0  # how many times the curvature of the mean a client may have before it is clipped
PRODUCTS = 10  # of the power iteration at a client, which sends nothing


class LowerProducts(NamedTuple):
    a: Y
    b: Y


class Gradients(NamedTuple):
    q: Y
    r: Y
    d: X


class Mixed(NamedTuple):
    w: X


class Powers(NamedTuple):
    mean: Scalar


@client_step
def lanczos_products(c: Oracle, x: Array | None, y: Array | None, a: Array, b: Array, u: Draw) -> LowerProducts:
    """∇²_y g_i(x, y) a and ∇²_y g_i(x, y) b: one step of two Lanczos runs."""
    at = c.y if y is None else y
    return LowerProducts(c.g_yy(at, a, u, at=x), c.g_yy(at, b, u, at=x))


@client_step
def start_gradients(c: Oracle, x: Array | None, y: Array | None, zeta: Draw, xi: Draw) -> Gradients:
    """∇_y g_i, ∇_y f_i and ∇_x f_i at (x, y)"""
    at = c.y if y is None else y
    return Gradients(c.g_y(at, zeta, at=x), c.f_y(at, xi, at=x), c.f_x(at, xi, at=x))


@client_step
def mixed_product(c: Oracle, x: Array | None, y: Array | None, v: Array, chi: Draw) -> Mixed:
    """∇_x∇_y g_i(x, y) v"""
    at = c.y if y is None else y
    return Mixed(c.g_xy(at, v, chi, at=x))


@client_step
def client_curvature(c: Oracle, x: Array | None, y: Array | None, v: Array, L: Array, u: Stream) -> Powers:
    """(L_i / L)^16, with L_i the largest curvature of the client's lower loss on the rows of any of the draws u.

    L_i is found by power iterations at the client, on the same rows from the first product to the last.
    """
    at = c.y if y is None else y

    def curvature(b: Draw) -> Any:
        def product(_: Any, w: Any) -> Any:
            return c.g_yy(at, w / (_length(w) + 1e-30), b, at=x)

        return _length(repeat(product, v, PRODUCTS))

    def larger(most: Any, b: Draw) -> Any:
        found = curvature(b)
        return jnp.maximum(most, found) if isinstance(found, Array) else max(most, found)

    most = walk(larger, 0.0 * L, u)
    share = most / L
    return Powers(
        (jnp.minimum(share, MOST_APART) if isinstance(share, Array) else min(share, MOST_APART)) ** POWER
    )


def _length(v: Any) -> Any:
    return (v * v).sum() ** 0.5


class Point:
    """A point (x, y) at which clients are asked: by rounds of a cohort, or by probes of all agents."""

    def __init__(self, fed: Federation, x: Array, y: Array, *, by_rounds: bool) -> None:
        self.fed, self.x, self.y, self._by_rounds = fed, x, y, by_rounds
        if by_rounds:
            fed.hold(x=x, y=y)

    def ask(self, step: Any, **arguments: Any) -> Any:
        """The mean of the replies to a step."""
        if self._by_rounds:
            return self.fed.round(step, x=None, y=None, **arguments)
        return self.fed.probe(step, x=self.x, y=self.y, **arguments)

    def moved(self, *, x: Array | None = None, y: Array | None = None) -> Point:
        """Another point, asked in the same way. A vector that stays is not sent again."""
        made = Point.__new__(Point)
        made.fed, made._by_rounds = self.fed, self._by_rounds
        made.x, made.y = self.x if x is None else x, self.y if y is None else y
        if self._by_rounds:
            self.fed.hold(**{name: v for name, v in (("x", x), ("y", y)) if v is not None})
        return made
