"""FedSOBA: the single-loop method SOBA (Dagréou, Ablin, Vaiter and Moreau, "A framework for bilevel optimization
that enables stochastic and global variance reduction algorithms", NeurIPS 2022) in a federation.

One outer iteration is one round, with the means over the cohort:

    x ← x - α (∇_x f - ∇_x∇_y g v)      y ← y - β ∇_y g      v ← v - ρ (∇²_y g v - ∇_y f)

all three at the old (x, y, v). A client receives and sends p + 2q numbers. Clients make no local steps, so the
fixed point has no drift: it is the stationary point itself, whatever the step sizes are, as long as they converge.

With a robust rule (`federation.aggregator`) on each of the three directions this is BR-FedBi. `upper` gives the
direction of x to any optimiser of Optax.

`minimax=True` is for problems with g = -f, where y maximises f (`fedbilevel.minimax`). There ∇_y f = -∇_y g = 0 at
y*(x), so v* = 0 and the hypergradient is ∇_x f alone. v is dropped: a client receives and sends p + q numbers, and
x ← x - α ∇_x f with y ← y + β ∇_y f is descent and ascent.

`steps="adagrad"` needs no step sizes, as tuning-free bilevel methods do (S-TFBO; from memory of the paper):

    a² ← a² + ||∇_y g||²      b² ← b² + ||∇²_y g v - ∇_y f||²      c² ← c² + ||∇_x f - ∇_x∇_y g v||²
    y: β/a      v: β/max(a, b)      x: α/(c max(a, b))

where a, b and c begin at `offset`, and α and β are plain factors that may stay at 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..errors import SettingsError
from ..federation import Federation
from ..oracle import Directions, Oracle, directions
from ..problem import BilevelProblem
from ..settings import Positive, about, settings
from ..steps import Draw, X, Y, client_step
from ..stepsizes import automatic_settings
from ..trials import Tried
from .single import Rates, SingleLoop, SingleState


@client_step
def three_directions(c: Oracle, v: Array, zeta: Draw, xi: Draw) -> Directions:
    """d_i(x, y, v), with one sample of each level for all three."""
    return directions(c, c.y, v, zeta, xi)


class TwoDirections(NamedTuple):
    x: X
    y: Y


@client_step
def two_directions(c: Oracle, zeta: Draw, xi: Draw) -> TwoDirections:
    """∇_x f_i and ∇_y g_i, which are all that a minimax problem needs."""
    return TwoDirections(c.f_x(c.y, xi), c.g_y(c.y, zeta))


@settings
class FedSOBA(SingleLoop):
    """FedSOBA: x, y and v move at once, in one round."""

    decay: ClassVar[Mapping[str, float]] = {"alpha": 1 / 2, "beta": 1 / 2, "rho": 1 / 2}  # as benchopt's SOBA

    steps: Annotated[
        Literal["constant", "adagrad"],
        Tried("constant", "adagrad"),
        about("constant: α, β and ρ as they are; adagrad: divided by norms of all directions so far"),
    ] = "constant"
    minimax: Annotated[bool, about("for g = -f: v is zero at the solution, and is not sent")] = False
    offset: Annotated[Positive, about("adagrad: the norms at the start; its square is added to the squares")] = 1.0

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        self.check_cohort(clients)
        for name in automatic_settings(self) if self.steps == "adagrad" else ():
            raise SettingsError(
                f"{name} = 'auto' is wrong with steps = 'adagrad': it is a factor there, which may be 1; use 1.0"
            )

    def init(self, problem: BilevelProblem, clients: int = 1) -> SingleState:
        """The initial parameters; v, the momenta and the sums of squares begin at their start."""
        start = self.start(problem)
        squares = jnp.full(3, self.offset**2, jnp.float32)
        return start._replace(past=squares) if self.steps == "adagrad" else start

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        if self.minimax:
            two = fed.round(two_directions, **self.rows)
            d = Directions(two.x, two.y, jnp.zeros_like(two.y))
        else:
            d = fed.round(three_directions, v=s.v, **self.rows)
        if s.past is None:
            return self.move(fed, s, d, self.rates)
        s = s._replace(past=s.past + jnp.stack([jnp.vdot(each, each) for each in d]))
        return self.move(fed, s, d, self.adapted(s.past))

    def adapted(self, squares: Array) -> Rates:
        """The step sizes of x, y and v for these sums of squares of their directions."""
        c, a, b = jnp.sqrt(squares)
        both = jnp.maximum(a, b)
        return Rates(self.rates.x / (c * both), self.rates.y / a, self.rates.v / both)
