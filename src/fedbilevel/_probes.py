"""Client steps for measurement. They are run by `fed.probe` and billed separately from the algorithm."""

from __future__ import annotations

from typing import Any, NamedTuple

from jax import Array

from .oracle import LocalOracle, Oracle, own_y
from .steps import Draw, Scalar, Scalars, Stream, Y, client_step, walk


class Losses(NamedTuple):
    upper: Scalar
    lower: Scalar


@client_step
def losses(c: Oracle, x: Array, y: Array, xi: Draw, zeta: Draw) -> Losses:
    """f_i(x, y) and g_i(x, y)"""
    return Losses(c.f(y, xi, at=x), c.g(y, zeta, at=x))


class Personal(NamedTuple):
    upper: Scalar
    lower: Scalar
    metrics: Scalars | None
    y: Y | None


@client_step
def personal(
    c: LocalOracle,
    beta: Array,
    shared: bool,
    kept: bool,
    names: tuple[str, ...],
    shown: bool,
    solving: Stream,
    xi: Draw,
    zeta: Draw,
) -> Personal:
    """f_i, g_i and the client's own metrics at the held x and at the y that the client finds for it.

    It takes the steps of the method, from the y that the client has kept or from the start. `shown` gives y too.
    """
    y = own_y(c, beta, shared, solving, kept)
    metrics = c.metrics(y, names) if names else None
    return Personal(c.f(y, xi), c.g(y, zeta), metrics, y if shown else None)


class Tested(NamedTuple):
    metrics: Scalars


@client_step
def tested(c: LocalOracle, names: tuple[str, ...]) -> Tested:
    """The client's own metrics at the held x and y."""
    return Tested(c.metrics(c.y, names))


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
