"""A single-loop method with momentum at both ends, as an example of a method in a package of its own.

One outer iteration is one round. A client computes three directions at the held x and y and the sent v,

    y: ∇_y g_i        v: ∇²_y g_i v - ∇_y f_i        x: ∇_x f_i - ∇_x∇_y g_i v

and sends a running average of the last one, which it keeps. The server steps along the means of y and v, and gives
the mean of x to an Optax optimiser with a momentum of its own.
"""

from typing import Annotated, ClassVar, NamedTuple

import jax.numpy as jnp
import optax
from jax import Array

import fedbilevel as fb


class Directions(NamedTuple):
    x: fb.X  # a direction: averaged as it is, and no new value of x
    y: fb.Y
    v: fb.Y
    average: fb.Own[fb.X]  # stays with the client, and comes back to its next step


@fb.client_step
def directions(c: fb.Oracle, v: Array, rho: float, xi: fb.Draw, zeta: fb.Draw) -> Directions:
    """The three directions; x is averaged over the iterations in which this client took part."""
    h = c.f_x(c.y, xi) - c.g_xy(c.y, v, zeta)
    average = c.own("average", jnp.zeros_like(h))
    average = average + rho * (h - average)
    return Directions(average, c.g_y(c.y, zeta), c.g_yy(c.y, v, zeta) - c.f_y(c.y, xi), average)


class State(NamedTuple):
    x: Array
    y: Array
    v: Array
    momentum: optax.OptState


@fb.settings
class MomentumSOBA:
    """SOBA with a momentum at the server and a running average at each client."""

    needs_server: ClassVar[bool] = True

    alpha: Annotated[float, fb.Moves.UPPER, fb.about("upper step size")] = 0.05
    beta: Annotated[float, fb.Moves.LOWER, fb.about("lower step size, also for v")] = 0.1
    rho: Annotated[float, fb.about("weight of a new direction in a client's average")] = 0.5
    momentum: Annotated[float, fb.about("momentum of the server")] = 0.9
    batch: Annotated[int | None, fb.about("rows of a sample; default: all")] = None
    participation: Annotated[int | float, fb.about("clients per outer iteration")] = 1.0

    def init(self, problem: fb.BilevelProblem, clients: int) -> State:
        x, y = problem.flat_x.vector, problem.flat_y.vector
        return State(x, y, jnp.zeros_like(y), self._optimiser.init(x))

    def step(self, fed: fb.Federation, s: State) -> State:
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        rows = dict(xi=fb.Sample("upper", self.batch), zeta=fb.Sample("lower", self.batch))
        d = fed.round(directions, v=s.v, rho=self.rho, **rows)
        update, momentum = self._optimiser.update(d.x, s.momentum, s.x)
        return State(optax.apply_updates(s.x, update), s.y - self.beta * d.y, s.v - self.beta * d.v, momentum)

    @property
    def _optimiser(self) -> optax.GradientTransformation:
        return optax.sgd(self.alpha, self.momentum)
