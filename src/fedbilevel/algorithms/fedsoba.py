"""FedSOBA: the single-loop method SOBA (Dagréou, Ablin, Vaiter and Moreau, "A framework for bilevel optimization
that enables stochastic and global variance reduction algorithms", NeurIPS 2022) in a federation.

One outer iteration is one round, with the means over the cohort:

    x ← x - α (∇_x f - ∇_x∇_y g v)      y ← y - β ∇_y g      v ← v - ρ (∇²_y g v - ∇_y f)

all three at the old (x, y, v). A client receives and sends p + 2q numbers. Clients make no local steps, so the
fixed point has no drift: it is the stationary point itself, whatever the step sizes are, as long as they converge.

With a robust rule (`federation.aggregator`) on each of the three directions this is BR-FedBi. `upper` gives the
direction of x to any optimiser of Optax.

With a part of the clients that differ, the mean over a cohort S has noise, and constant steps end at a distance
from the stationary point. `correction="saga"` is SABA of the same paper, with clients in the place of rows. Client
i keeps the direction t_i that it sent last, and sends the change:

    c_i = d_i(s) - t_i,  t_i ← d_i(s)        d = t̄ + mean_S c_i,  t̄ ← t̄ + |S|/m mean_S c_i

so the server has t̄ = 1/m Σ_i t_i, the mean over all m clients, without their vectors. d has no bias, and its noise
goes to zero with the steps, since t_i = d_i at the stationary point: constant steps converge linearly. The first
round asks all clients, so that every t_i is known, and is billed so. A client receives and sends p + 2q numbers
as before, and keeps 2(p + 2q): the t_i before the last one is kept as well, and the server tells a client (one
number) which of the two it has counted. So a reply that was lost leaves no error behind. Minibatches have noise
that this does not remove, and so has privacy.

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

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..errors import SettingsError
from ..federation import Federation
from ..oracle import Directions, Oracle, directions
from ..problem import BilevelProblem
from ..settings import Positive, about, settings
from ..steps import Draw, Own, PerClient, X, Y, client_step
from ..stepsizes import Moves, automatic_settings
from ..trials import Tried
from .single import Rates, SingleLoop, SingleState, minus


class Kept(NamedTuple):
    """What a client keeps: its direction that the server has counted, the last one, and the date of the last."""

    counted: Directions
    last: Directions
    date: Array


class Change(NamedTuple):
    x: X
    y: Y
    v: Annotated[Y, Moves.PRODUCT]
    kept: Own[Kept]


class Table(NamedTuple):
    """What the server keeps: t̄, the date of every client's t_i (0: it has none), and the present date."""

    mean: Directions
    dates: Array
    date: Array


@client_step
def three_directions(c: Oracle, v: Array, zeta: Draw, xi: Draw) -> Directions:
    """d_i(x, y, v), with one sample of each level for all three."""
    return directions(c, c.y, v, zeta, xi)


@client_step
def changed_directions(c: Oracle, v: Array, counted: Array, date: Array, zeta: Draw, xi: Draw) -> Change:
    """d_i(x, y, v) - t_i, where t_i is the direction of the client at the date that the server has counted."""
    d = directions(c, c.y, v, zeta, xi)
    none = Directions(*(0.0 * each for each in d))
    kept = c.own("kept", Kept(none, none, 0.0 * date))
    t = jax.tree.map(lambda last, before: jnp.where(kept.date == counted, last, before), kept.last, kept.counted)
    return Change(*minus(d, 1.0, t), Kept(t, d, date))


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
    correction: Annotated[
        Literal["none", "saga"],
        about("none: the mean over the cohort; saga: corrected by the last directions of all, which clients keep"),
    ] = "none"

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        self.check_cohort(clients)
        for name in automatic_settings(self) if self.steps == "adagrad" else ():
            raise SettingsError(
                f"{name} = 'auto' is wrong with steps = 'adagrad': it is a factor there, which may be 1; use 1.0"
            )
        if self.minimax and self.correction == "saga":
            raise SettingsError(
                "correction = 'saga' is wrong with minimax = true: it corrects three directions, and that of v is "
                "not sent there; use correction = 'none'"
            )
        if self.steps == "adagrad" and self.correction == "saga":
            raise SettingsError(
                "correction = 'saga' is wrong with steps = 'adagrad': steps that fall with the sum of all squares "
                "would be too small for it; use steps = 'constant'"
            )

    def init(self, problem: BilevelProblem, clients: int = 1) -> SingleState:
        """The initial parameters; v, the momenta, the sums of squares and t̄ begin at their start."""
        start = self.start(problem)
        if self.correction == "saga":
            zero = Directions(*(jnp.zeros_like(each) for each in (start.x, start.y, start.v)))
            return start._replace(past=Table(zero, jnp.zeros(clients), jnp.zeros(())))
        squares = jnp.full(3, self.offset**2, jnp.float32)
        return start._replace(past=squares) if self.steps == "adagrad" else start

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: one round."""
        if isinstance(s.past, Table):
            d, table = self.corrected(fed, s, s.past)
            return self.move(fed, s._replace(past=table), d, self.rates)
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

    def corrected(self, fed: Federation, s: SingleState, table: Table) -> tuple[Directions, Table]:
        """t̄ and the mean change of a cohort, and the table after it: one round; the first asks all clients."""
        everyone, date = range(table.dates.size), table.date + 1
        fed = fed.cohort(self.participation) if np.any(np.asarray(table.dates)) else fed
        fed.hold(x=s.x, y=s.y)
        change = fed.round(changed_directions, v=s.v, counted=PerClient(table.dates), date=date, **self.rows)
        heard = sorted(fed.heard)
        share = float(fed.weights(heard).sum() / fed.weights(everyone).sum())
        d = minus(table.mean, -1.0, Directions(*change[:3]))
        mean = minus(table.mean, -share, Directions(*change[:3]))
        return d, Table(mean, table.dates.at[np.asarray(heard)].set(date), date)

    def adapted(self, squares: Array) -> Rates:
        """The step sizes of x, y and v for these sums of squares of their directions."""
        c, a, b = jnp.sqrt(squares)
        both = jnp.maximum(a, b)
        return Rates(self.rates.x / (c * both), self.rates.y / a, self.rates.v / both)
