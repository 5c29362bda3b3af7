"""The client steps that the methods of the FedNest family share: the hypergradient and local work."""

from __future__ import annotations

from typing import NamedTuple

from jax import Array

from ..oracle import Oracle
from ..steps import Draw, Stream, X, Y, client_step, svrg


class Hypergradient(NamedTuple):
    h: X


class Upper(NamedTuple):
    x: X


class Lower(NamedTuple):
    y: Y


@client_step
def hypergradient(c: Oracle, p: Array, xi: Draw, chi: Draw) -> Hypergradient:
    """h_i = ∇_x F_i(x, y; ξ_i) - ∇_x∇_y G_i(x, y; χ_i) p"""
    return Hypergradient(c.f_x(c.y, xi) - c.g_xy(c.y, p, chi))


@client_step
def upper_steps(c: Oracle, h: Array, alpha: Array, shared: bool, xi: Stream) -> Upper:
    """One-Round-Upper: x_i ← x_i - α_i (h - ∇_x F_i(x, y; ξ) + ∇_x F_i(x_i, y; ξ)), τ_i times from x.

    `shared` divides the step among the steps: α_i = α / τ_i.
    """
    step = alpha / xi.steps if shared else alpha
    return Upper(svrg(lambda x, b: c.f_x(c.y, b, at=x), c.x, h, step, xi))


@client_step
def lower_steps(c: Oracle, q: Array, beta: Array, shared: bool, zeta: Stream) -> Lower:
    """One-Round-Lower: y_i ← y_i - β_i (∇_y G_i(x, y_i; ζ) - ∇_y G_i(x, y; ζ) + q), τ_i times from y."""
    step = beta / zeta.steps if shared else beta
    return Lower(svrg(c.g_y, c.y, q, step, zeta))
