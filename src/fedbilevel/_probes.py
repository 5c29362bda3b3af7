"""Client steps for measurement. They are run by `fed.probe` and billed separately from the algorithm."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from .oracle import Oracle
from .steps import Draw, Scalar, client_step


class Losses(NamedTuple):
    upper: Scalar
    lower: Scalar


@client_step
def losses(c: Oracle, x: Array, y: Array, xi: Draw, zeta: Draw) -> Losses:
    """f_i(x, y) and g_i(x, y)"""
    return Losses(c.f(y, xi, at=x), c.g(y, zeta, at=x))
