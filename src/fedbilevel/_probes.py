"""Client steps for measurement. They are run by `fed.probe` and billed separately from the algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from .oracle import Oracle
from .steps import Draw, Scalar, Stream, client_step, walk


class Losses(NamedTuple):
    upper: Scalar
    lower: Scalar


@client_step
def losses(c: Oracle, x: Array, y: Array, xi: Draw, zeta: Draw) -> Losses:
    """f_i(x, y) and g_i(x, y)"""
    return Losses(c.f(y, xi, at=x), c.g(y, zeta, at=x))


class Curvature(NamedTuple):
    L: Scalar


@client_step
def curvature(c: Oracle, x: Array, y: Array, v: Array, u: Stream) -> Curvature:
    """The largest modulus of an eigenvalue of ∇²_y g_i(x, y), by as many power iterations from v as u has draws.

    With  v ← ∇²_y g_i v / ||v||  the length of v tends to it from below.
    """
    return Curvature(_length(walk(lambda v, rows: c.g_yy(y, v / (_length(v) + 1e-30), rows, at=x), v, u)))


def _length(v: Any) -> Any:
    return (v * v).sum() ** 0.5
