"""FedMSA (Tarzanagh, Li, Sharma and Oymak, "Federated Multi-Sequence Stochastic Approximation with Local
Hypergradient Estimation", 2023): local steps on x, y and v that stay exact when clients differ.

With s = (x, y, v) and the directions d_i of `single.py`, an outer iteration r has two rounds:

    all clients:  h ← mean_i [d_i(s_r) - (1 - c) d_i(s_{r-1})] + (1 - c) h        c = 1 in the first iteration
    the cohort:   s_i = s_r, h_i = h;  s_i ← s_i - (α, β, ρ) h_i;  h_i ← h_i + d_i(s_i) - d_i(s_i before)
                  τ steps;  s_{r+1} = mean_i s_i

Both directions of a difference are taken on the same rows. At a stationary point h = 0 and no client moves, so the
fixed point has no drift, even if the cohort of the second round is a single client. The price is the first round:
it asks every registered client, and is billed so. A client receives and sends 2(p + 2q) numbers, and receives
p + 2q more for s_{r-1} if c < 1.
"""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from ..federation import Federation
from ..oracle import Directions, Oracle, directions
from ..problem import BilevelProblem
from ..schedules import decay_of
from ..settings import Count, about, settings
from ..steps import Draw, Next, Samples, Stream, X, Y, client_step, walk
from ..stepsizes import Decays
from ..trials import Tried
from .local import rows_of
from .single import SingleState, ThreeVariables, minus


class Moved(NamedTuple):
    x: Next[X]
    y: Next[Y]
    v: Next[Y]


class Past(NamedTuple):
    """What FedMSA carries: the last point, the last h, and whether there has been an iteration yet (1 or 0)."""

    s: Directions
    h: Directions
    begun: Array


@client_step
def new_directions(
    c: Oracle, old_x: Array | None, old_y: Array | None, old_v: Array | None, keep: Array, zeta: Draw, xi: Draw
) -> Directions:
    """d_i(s_r), less a part of d_i(s_{r-1}) on the same rows if that point was sent."""
    d = directions(c, c.y, c.held("v"), zeta, xi)
    if old_x is None or old_y is None or old_v is None:
        return d
    return minus(d, keep, directions(c, old_y, old_v, zeta, xi, at=old_x))


@client_step
def corrected_steps(
    c: Oracle,
    h_x: Array,
    h_y: Array,
    h_v: Array,
    keep: Array,
    eta_x: Array,
    eta_y: Array,
    eta_v: Array,
    zeta: Stream,
    xi: Stream,
) -> Moved:
    """Local steps along h_i, which becomes d_i(new) + keep (h_i - d_i(old)), on the same rows, after each."""
    eta, start = (eta_x, eta_y, eta_v), Directions(c.x, c.y, c.held("v"))
    h = Directions(h_x, h_y, h_v)
    first = minus(start, eta, h)
    if zeta.active.shape[0] == 1:
        return Moved(*first)

    def move(carried: tuple[Directions, ...], b: Draw, u: Draw) -> tuple[Directions, ...]:
        s, last, h = carried
        new, old = (directions(c, at.y, at.v, b, u, at=at.x) for at in (s, last))
        h = minus(new, keep, minus(old, 1.0, h))
        return minus(s, eta, h), s, h

    rest = (jax.tree.map(lambda a: a[1:], stream) for stream in (zeta, xi))
    return Moved(*walk(move, (first, start, h), *rest)[0])


@settings
class Corrected(ThreeVariables):
    """Two rounds: the mean direction h at s, renewed in part, and local steps that are corrected by it."""

    tau: Annotated[Count, Tried(5, 20), about("local steps τ; the first one costs no derivative")] = 5
    renewal: Annotated[
        Annotated[float, Field(gt=0, le=1)],
        Decays(2),
        about("how much of h is new in an iteration, c; 1: all of it, which needs no last point"),
    ] = 1.0

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        self.check_cohort(clients)

    def init(self, problem: BilevelProblem, clients: int = 1) -> SingleState:
        """The initial parameters of the problem; v and h begin at zero."""
        start = self.begin(problem)
        if self.renewal == 1 and "renewal" not in decay_of(self):
            return start
        zero = Directions(*(jnp.zeros_like(each) for each in (start.x, start.y, start.v)))
        return start._replace(past=Past(Directions(start.x, start.y, start.v), zero, jnp.zeros(())))

    def renewed(self, fed: Federation, s: SingleState) -> tuple[SingleState, Directions]:
        """h = mean_i [d_i(s) - (1 - c) d_i(s before)] + (1 - c) h, and the state that has it: one round."""
        fed.hold(x=s.x, y=s.y, v=s.v)
        past: Past | None = s.past
        keep = 0.0 if past is None else (1 - self.renewal) * past.begun
        old = (None, None, None) if past is None else past.s
        sent = dict(zip(("old_x", "old_y", "old_v"), old, strict=True))
        h = fed.round(new_directions, keep=keep, **sent, **self.rows)
        if past is not None:
            h = minus(h, -keep, past.h)
            s = s._replace(past=Past(Directions(s.x, s.y, s.v), h, jnp.ones(())))
        fed.note(hypergradient_estimate=h.x, lower_residual=h.y)
        return s, h

    def travel(self, fed: Federation, s: SingleState, h: Directions, keep: Any) -> SingleState:
        """The mean of the points to which clients come by τ steps along h and its corrections: one round."""
        moved = fed.round(
            corrected_steps,
            **dict(zip(("h_x", "h_y", "h_v"), h, strict=True)),
            keep=keep,
            **dict(zip(("eta_x", "eta_y", "eta_v"), self.rates, strict=True)),
            zeta=Samples("lower", rows_of(self.batch_zeta), self.tau),
            xi=Samples("upper", rows_of(self.batch_xi), self.tau),
        )
        return self.land(fed, s, Directions(*moved))


@settings
class FedMSA(Corrected):
    """FedMSA: corrected local steps on x, y and v; every client is asked in the first of its two rounds."""

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: a round of all clients, and one of the cohort."""
        s, h = self.renewed(fed, s)
        return self.travel(fed.cohort(self.participation), s, h, keep=1.0)
