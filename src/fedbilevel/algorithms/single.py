"""What single-loop methods share: one state s = (x, y, v), three directions, and their step sizes.

    d_i(s) = (∇_x f_i - ∇_x∇_y g_i v,  ∇_y g_i,  ∇²_y g_i v - ∇_y f_i)

v follows the solution of ∇²_y g v = ∇_y f as y follows that of the lower problem, so that nothing is solved in an
outer iteration. All three directions are linear in the losses, hence their means over clients have no bias.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from ..federation import Federation, cohort_size
from ..oracle import Directions
from ..problem import BilevelProblem
from ..schedules import Scheduled
from ..settings import Positive, about, settings
from ..steps import Sample
from ..stepsizes import Decays, Moves, automatic
from .local import CLIENTS_ASKED, BatchSize, Participation, regions, rows_of, warn_of_sets
from .optimiser import Memory, advance, chosen, first_memory


class Rates(NamedTuple):
    """The step sizes of x, y and v."""

    x: Any
    y: Any
    v: Any


class SingleState(NamedTuple):
    """The start of an outer iteration.

    v         the estimate of (∇²_y g)^{-1} ∇_y f
    speed     the running directions of the server's momentum, or None
    upper     the state of the server's optimiser of x, or None
    past      what else a method carries from one outer iteration to the next: a pytree of arrays, or None
    """

    x: Array
    y: Array
    v: Array
    speed: Directions | None = None
    upper: Memory = None
    past: Any = None


def minus(s: Directions, rates: Any, d: Directions) -> Directions:
    """s - rates d, with one rate for all three or with one for each."""
    each = rates if isinstance(rates, tuple) else (rates,) * 3
    return Directions(*(a - rate * b for a, rate, b in zip(s, each, d, strict=True)))


@settings
class ThreeVariables(Scheduled):
    """The step sizes of x, y and v, the rows of the directions, and the sets in which the three stay."""

    needs_server: ClassVar[bool] = True
    projects: ClassVar[bool] = True

    participation: Annotated[Participation, CLIENTS_ASKED] = 0.1
    alpha: Annotated[Positive, Moves.UPPER, automatic, about("upper step size α")] = 0.01
    beta: Annotated[Positive, Moves.LOWER, automatic, about("lower step size β")] = 0.1
    rho: Annotated[
        Positive | None,
        Moves.PRODUCT,
        Decays(),
        automatic,
        about("step size of v; default: β, as y and v have the same curvature"),
    ] = None
    radius: Annotated[Positive | None, about("v is kept in the ball of this radius, at the server")] = None
    batch_zeta: Annotated[BatchSize, about("rows for the derivatives of the lower loss")] = "full"
    batch_xi: Annotated[BatchSize, about("rows for the derivatives of the upper loss")] = "full"

    @property
    def rates(self) -> Rates:
        """The step sizes of x, y and v."""
        return Rates(self.alpha, self.beta, self.beta if self.rho is None else self.rho)

    @property
    def rows(self) -> dict[str, Any]:
        """One sample of each level, on which all three directions are taken."""
        return dict(
            zeta=Sample("lower", rows_of(self.batch_zeta)),
            xi=Sample("upper", rows_of(self.batch_xi)),
        )

    def check_cohort(self, clients: int) -> None:
        """Raise `SettingsError` if the participation does not fit the number of registered clients."""
        cohort_size(self.participation, clients)

    @property
    def reach(self) -> float:
        """How many times its step sizes an outer iteration moves x, y and v along their directions."""
        steps = getattr(self, "tau", 1)
        return float(np.mean(steps)) * float(getattr(self, "gamma", 1.0))

    def begin(self, problem: BilevelProblem) -> SingleState:
        """The initial parameters of the problem; v begins at zero."""
        warn_of_sets(problem, restricts=True)
        x, y = problem.flat_x.vector, problem.flat_y.vector
        return SingleState(x, y, jnp.zeros_like(y))

    def land(self, fed: Federation, s: SingleState, moved: Directions) -> SingleState:
        """The state at the nearest point of the feasible sets. v has only directions in which y can move."""
        sets = regions(fed)
        y = sets.y.nearest(moved.y)
        return s._replace(x=sets.x.nearest(moved.x), y=y, v=self._bounded(sets.y.along(y, moved.v)))

    def _bounded(self, v: Array) -> Array:
        """v in its ball. A mean of projections would not be a projected mean, so only the server projects."""
        if self.radius is None:
            return v
        return v * jnp.minimum(1.0, self.radius / jnp.maximum(jnp.linalg.norm(v), 1e-30))


@settings
class SingleLoop(ThreeVariables):
    """The move of the server along the mean directions, with momentum, and an optimiser of x."""

    momentum: Annotated[
        Annotated[float, Field(ge=0, lt=1)], about("heavy-ball momentum of x, y and v, at the server")
    ] = 0.0
    upper: Annotated[
        Any,
        about(
            "the server's optimiser of x, any of Optax, such as { name = 'adam', learning_rate = 0.01 }; it is "
            "given the direction of x, and takes the place of the server's step along it"
        ),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "upper", chosen(self.upper))

    def start(self, problem: BilevelProblem) -> SingleState:
        """The initial parameters of the problem; v and the momenta begin at zero."""
        s = self.begin(problem)
        still = Directions(jnp.zeros_like(s.x), jnp.zeros_like(s.y), s.v) if self.momentum else None
        return s._replace(speed=still, upper=None if self.upper is None else first_memory(self.upper, problem))

    def move(self, fed: Federation, s: SingleState, d: Directions, rates: Rates) -> SingleState:
        """The server's step: s ← s - rates d, with its momentum and optimiser, in the feasible sets."""
        fed.note(hypergradient_estimate=d.x, lower_residual=d.y)
        if s.speed is not None:
            d = Directions(*(self.momentum * old + new for old, new in zip(s.speed, d, strict=True)))
            s = s._replace(speed=d)
        x, memory = s.x - rates.x * d.x, s.upper
        if self.upper is not None:
            x, memory = advance(self.upper, fed.engine.problem, d.x, s.upper, s.x)
        moved = Directions(x, s.y - rates.y * d.y, s.v - rates.v * d.v)
        return self.land(fed, s, moved)._replace(upper=memory)
