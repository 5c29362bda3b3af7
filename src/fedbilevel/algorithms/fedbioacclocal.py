"""FedBiOAcc-Local (Li, Huang and Huang, "Communication-Efficient Federated Bilevel Optimization with Global and
Local Lower Level Problems", NeurIPS 2023). The equations are written from memory of the paper.

    min_x 1/m Σ_i f_i(x, y_i*(x))    subject to    y_i*(x) = argmin_y g_i(x, y)

Client i moves s_i = (x_i, y_i, v_i) along momenta M_i = (ν_i, ω_i, ϱ_i) of the directions d_i of `single.py`. The
momenta are those of STORM, with one sample B for the new and the old point:

    s_i ← s_i - (α, β, ρ) M_i        M_i ← d_i(s_i; B) + (1 - c) (M_i - d_i(s_i^old; B))

An outer iteration has τ local steps and two rounds. The first one takes M_i at the averaged x and averages ν. In
the second one clients make their steps and x is averaged. y_i, v_i, ω_i and ϱ_i never leave the client, so a
client receives 2p numbers and sends 2p. The momentum cannot travel with x_i, because it is taken at the mean x.

The paper lets the rates decrease and has c α_t² in place of c. Here all of them are constants.

The mean ν corrects the drift of the clients. What is left of the drift is of the order of c; on full batches with
c = 0 or τ ≤ 2 the fixed point is the stationary point itself. The analysis is for all clients: a client that was
away goes on from the point and the momenta that it left with.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, NamedTuple

import jax
import numpy as np
from jax import Array
from pydantic import Field

from ..federation import Federation, cohort_size
from ..oracle import Directions, LocalOracle, directions
from ..problem import BilevelProblem
from ..settings import Positive, about, settings
from ..steps import Draw, Next, Own, Sample, Samples, Stream, X, client_step, walk
from ..stepsizes import Moves
from .local import CLIENTS_ASKED, Participation, State, check_counts, count_of, regions, rows_of
from .personal import OwnLower, OwnLowerWork
from .single import Rates, minus


class Past(NamedTuple):
    """What a client keeps: its last but one point, its momenta there, and whether it has kept anything yet."""

    point: Directions
    momenta: Directions
    known: Any


class Momentum(NamedTuple):
    nu: X
    past: Own[Past]


class Moved(NamedTuple):
    x: Next[X]
    y: Own[Array]
    v: Own[Array]
    past: Own[Past]


def storm(c: LocalOracle, s: Directions, past: Past, forgotten: Array, zeta: Draw, xi: Draw) -> Directions:
    """d_i(s; B) + (1 - c) (M - d_i(s^old; B)), and d_i(s; B) if there is no past."""
    new, old = (directions(c, at.y, at.v, zeta, xi, at=at.x) for at in (s, past.point))
    keep = past.known * (1.0 - forgotten)
    return Directions(*(a + keep * (m - b) for a, m, b in zip(new, past.momenta, old, strict=True)))


def own_point(c: LocalOracle) -> Directions:
    """The held x, and the client's own y and v."""
    return Directions(c.x, c.own("y", c.y_start), c.own("v", c.y_start * 0.0))


def own_past(c: LocalOracle, s: Directions) -> Past:
    """The client's past; without one, the present point and no momentum."""
    return c.own("past", Past(s, Directions(*(0.0 * each for each in s)), np.float32(0.0)))


@client_step
def momenta(c: LocalOracle, forgotten: Array, zeta: Draw, xi: Draw) -> Momentum:
    """M_i at the averaged x; only ν_i is sent."""
    s = own_point(c)
    past = own_past(c, s)
    made = storm(c, s, past, forgotten, zeta, xi)
    return Momentum(made.x, Past(s, made, np.float32(1.0)))


@client_step
def momentum_steps(
    c: LocalOracle,
    nu: Array,
    alpha: Array,
    beta: Array,
    rho: Array,
    forgotten: Array,
    zeta: Stream,
    xi: Stream,
) -> Moved:
    """τ_i steps along the momenta, beginning with the mean ν; only x_i is sent."""
    s, rates = own_point(c), Rates(alpha, beta, rho)
    first = own_past(c, s).momenta._replace(x=nu)

    def move(carried: tuple[Directions, Past], b: Draw, u: Draw) -> tuple[Directions, Past]:
        s, past = carried
        made = storm(c, s, past, forgotten, b, u)
        return minus(s, rates, made), Past(s, made, past.known)

    # The momentum of the first step is that of the round before, so it takes one draw less than there are steps.
    start = minus(s, rates, first), Past(s, first, np.float32(1.0))
    moved, past = walk(move, start, *jax.tree.map(lambda a: a[1:], (zeta, xi)))
    return Moved(moved.x, moved.y, moved.v, past)


@settings
class FedBiOAccLocal(OwnLowerWork):
    """FedBiOAcc-Local: STORM at every client; only x and its momentum are averaged."""

    needs_server: ClassVar[bool] = True
    projects: ClassVar[bool] = True

    participation: Annotated[Participation, CLIENTS_ASKED] = 0.1
    alpha: Annotated[Positive, Moves.UPPER, about("upper step size α")] = 0.01
    c: Annotated[float, Field(ge=0, le=1), about("how much of a momentum is forgotten in a step; 0: none")] = 0.01

    def own_lower(self, steps: int | None = None) -> OwnLower:
        """The steps of a client to its own y."""
        return OwnLower(self.beta, self.lower_rows(steps), True)

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        cohort_size(self.participation, clients)
        check_counts("tau", self.tau, clients)

    def init(self, problem: BilevelProblem, clients: int = 1) -> State:
        """The initial parameters of the problem; y stays, as the start of clients that are asked first."""
        return State(problem.flat_x.vector, problem.flat_y.vector)

    def step(self, fed: Federation, s: State) -> State:
        """One outer iteration: two rounds."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        one = dict(zeta=Sample("lower", rows_of(self.batch_zeta)), xi=Sample("upper", rows_of(self.batch_xi)))
        nu = fed.round(momenta, forgotten=self.c, **one).nu
        fed.note(hypergradient_estimate=nu)
        x = fed.round(
            momentum_steps,
            nu=nu,
            alpha=self.alpha,
            beta=self.beta,
            rho=self.product_step,
            forgotten=self.c,
            zeta=self.lower_rows(),
            xi=Samples("upper", rows_of(self.batch_xi), count_of(self.tau)),
        ).x
        return s._replace(x=regions(fed).x.nearest(x))
