"""Steps whose clients keep something, in a module that an actor or a site can import."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import jax.numpy as jnp
from jax import Array

from fedbilevel.federation import Federation
from fedbilevel.oracle import Oracle
from fedbilevel.problem import BilevelProblem
from fedbilevel.steps import Draw, Next, Own, Sample, Scalar, Y, client_step


class Moved(NamedTuple):
    """The new y; the client keeps its velocity and how often it was asked."""

    y: Next[Y]
    velocity: Own[Y]
    visits: Own[dict[str, Array]]


@client_step
def momentum(c: Oracle, zeta: Draw, rate: float) -> Moved:
    """A step with heavy-ball momentum of the client's own."""
    velocity = 0.9 * c.own("velocity", jnp.zeros_like(c.y)) + c.g_y(c.y, zeta)
    visits = c.own("visits", {"count": jnp.zeros((), jnp.int32)})
    return Moved(c.y - rate * velocity, velocity, {"count": visits["count"] + 1})


class Speed(NamedTuple):
    value: Scalar
    velocity: Own[Y]


@client_step
def speed(c: Oracle, like: Array) -> Speed:
    """How fast the client is, for a probe. It would stop the client, if a probe could leave a trace."""
    velocity = c.own("velocity", jnp.zeros_like(like))
    return Speed(jnp.linalg.norm(velocity), jnp.zeros_like(velocity))


class Iterate(NamedTuple):
    x: Array
    y: Array


@dataclass(frozen=True)
class HeavyBall:
    """A method whose outer iteration is one round of `momentum`, with so many clients."""

    participation: int

    needs_server: ClassVar[bool] = True

    def init(self, problem: BilevelProblem, clients: int) -> Iterate:
        return Iterate(problem.flat_x.vector, problem.flat_y.vector)

    def step(self, fed: Federation, s: Iterate) -> Iterate:
        cohort = fed.cohort(self.participation)
        cohort.hold(x=s.x, y=s.y)
        return Iterate(s.x, cohort.round(momentum, zeta=Sample("lower", 3), rate=0.05).y)
