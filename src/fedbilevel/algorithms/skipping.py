"""The lower solver of E-AiPOD (Xiao, Shen, Yin and Chen, "Alternating Implicit Projected SGD and Its Efficient
Variants for Equality-constrained Bilevel Optimization", 2023): local steps with a correction that clients keep,
and rounds at random times, as in ProxSkip. From the released code, for the constraint y_1 = ... = y_m:

    y_i ← y_i - β (∇_y G_i(x, y_i; ζ) - r_i);    with probability p_c, one coin for all clients:
    ȳ = mean_i y_i;    r_i ← r_i + p_c/β (ȳ - y_i);    y_i = ȳ

At r_i = ∇_y g_i(x, y*) no client moves away from y*, so the fixed point has no drift, and the gradient q that SVRG
asks for in a round of its own is not needed: a communication is one round of q numbers up and down. The r_i sum to
zero after every communication, if all clients take part. After a change of x they go on from where they were.

An outer iteration has S local steps, and a round after the last one in any case, since the upper part needs a
common y: 1 + (S - 1) p_c rounds are expected. A client learns ȳ with its next round, and renews r_i then.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from jax import Array

from ..errors import SettingsError
from ..federation import Federation
from ..oracle import Oracle
from ..steps import Next, Own, Samples, Stream, Y, client_step, walk
from ..stepsizes import Automatic


class Skipped(NamedTuple):
    y: Next[Y]
    r: Own[Y]
    end: Own[Y]


@client_step
def skipping_steps(c: Oracle, beta: Array, chance: Array, steps: Array, zeta: Stream) -> Skipped:
    """The local steps up to the next communication, after r_i is renewed by the last one, whose mean is held."""
    r = c.own("r", 0.0 * c.y) + chance / beta * (c.y - c.own("end", c.y))
    active = zeta.active & (np.arange(zeta.active.shape[0]) < steps)
    end = walk(lambda y, b: y - beta * (c.g_y(y, b) - r), c.y, Stream(zeta.draws, active))
    return Skipped(end, r, end)


def skip_loop(fed: Federation, y: Array, steps: int, chance: float, beta: float, rows: int | None) -> Array:
    """The y after so many local steps at the held x. Streams have lengths of powers of two, for few programs."""
    coins = fed.rng("coins").random(steps - 1) < chance
    for gap in np.diff([0, *(np.flatnonzero(coins) + 1), steps]):
        fed.hold(y=y)
        work = Samples("lower", rows, 1 << (int(gap) - 1).bit_length())
        y = fed.round(skipping_steps, beta=beta, chance=chance, steps=float(gap), zeta=work).y
    return y


def check_skipping(method: Any, everyone: bool) -> None:
    """Raise `SettingsError` if another setting does not go with the lower solver "skip"."""
    given = "lower_solver = 'skip'"
    if not everyone:
        raise SettingsError(
            f"participation = {method.participation} is wrong with {given}: the corrections that clients keep sum "
            "to zero only if all take part; use 1.0, or 'svrg'"
        )
    if method.carries and (method.estimator != "cg" or method.memory):
        raise SettingsError(
            f"{given} is wrong: the Hessian products travel with N lower rounds, and it has a random number of "
            "them; use estimator = 'cg' without a memory, or fednest"
        )
    if not isinstance(method.lower_steps, int):
        raise SettingsError(f"lower_steps = {method.lower_steps} is wrong with {given}: give one number of steps")
    if method.share_steps or method.momentum_y:
        name = "share_steps" if method.share_steps else "momentum_y"
        raise SettingsError(f"{name} = {getattr(method, name)} is wrong with {given}: it has none; leave it out")
    if isinstance(method.beta, Automatic):
        raise SettingsError(
            f"beta = 'auto' is wrong with {given}: a trial would change what clients keep; give a number"
        )
