"""SimFBO and ShroFBO (Yang, Xiao and Ji, "SimFBO: Towards Simple, Flexible and Communication-efficient Federated
Bilevel Learning", NeurIPS 2023). The equations are written from memory of the paper.

One outer iteration is one round. With the directions d_i of `single.py`, every client of the cohort does

    s_i ← s_i - (α, β, ρ) d_i(s_i; ζ_k, ξ_k)        τ_i times from s = (x, y, v)

and SimFBO's server steps along the mean of the sums of the directions, at a rate of its own:

    s ← s - γ (α, β, ρ) mean_i Σ_{k<τ_i} d_i

With γ = 1 the server takes the mean of the clients' s_i, and the method is FedBiO (Li, Huang and Huang, NeurIPS
2023). With τ = 1 and γ = 1 it is FedSOBA. A client receives and sends p + 2q numbers.

If clients make different numbers of local steps, those with more steps weigh more: SimFBO then goes to a
stationary point of the problem with weights τ_i, however small the steps are. ShroFBO's clients send
Σ_k d_i / τ_i, and the server multiplies the mean by the mean of τ_i, so it goes to a stationary point of the
problem itself.

With several local steps on clients that differ, the fixed point is not the stationary point. On full batches it
solves  Σ_i W_i d_i(s) = 0  with  W_i = Σ_{k<τ_i} (I - K_i E)^k,  where K_i is the derivative of d_i and E has the
local step sizes. It does not depend on γ, and goes to the stationary point as the local step sizes go to zero. So
small local steps with a large γ can be both accurate and fast.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
from jax import Array

from ..federation import Federation
from ..oracle import Directions, Oracle, directions
from ..problem import BilevelProblem
from ..settings import Positive, about, settings
from ..steps import Draw, Samples, Scalar, Stream, X, Y, client_step, walk
from ..stepsizes import Moves
from ..trials import Tried
from .local import Steps, check_counts, count_of, rows_of
from .single import Rates, SingleLoop, SingleState, minus


class Resilient(NamedTuple):
    x: X
    y: Y
    v: Annotated[Y, Moves.PRODUCT]
    steps: Scalar


def summed(c: Oracle, v: Array, rates: Rates, zeta: Stream, xi: Stream) -> Directions:
    """Σ_{k<τ_i} d_i(s_i^k) along local steps from (x, y, v). The first one is taken at the held x."""

    def first(rows: Draw) -> Draw:
        return jax.tree.map(lambda a: a[0], rows)

    d = directions(c, c.y, v, first(zeta.draws), first(xi.draws))
    if zeta.active.shape[0] == 1:
        return d

    def move(carried: tuple[Directions, Directions], b: Draw, u: Draw) -> tuple[Directions, Directions]:
        s, total = carried
        d = directions(c, s.y, s.v, b, u, at=s.x)
        return minus(s, rates, d), minus(total, -1.0, d)

    rest = (jax.tree.map(lambda a: a[1:], stream) for stream in (zeta, xi))
    return walk(move, (minus(Directions(c.x, c.y, v), rates, d), d), *rest)[1]


@client_step
def local_directions(
    c: Oracle, v: Array, eta_x: Array, eta_y: Array, eta_v: Array, zeta: Stream, xi: Stream
) -> Directions:
    """The sum of the directions along the client's local steps."""
    return summed(c, v, Rates(eta_x, eta_y, eta_v), zeta, xi)


@client_step
def resilient_directions(
    c: Oracle, v: Array, eta_x: Array, eta_y: Array, eta_v: Array, zeta: Stream, xi: Stream
) -> Resilient:
    """The mean of the directions along the client's local steps, and their number."""
    d = summed(c, v, Rates(eta_x, eta_y, eta_v), zeta, xi)
    x, y, v = (each / zeta.steps for each in d)
    return Resilient(x, y, v, 1.0 * zeta.steps)


@settings
class LocalDirections(SingleLoop):
    """Local steps on x, y and v together."""

    tau: Annotated[Steps, Tried(5, 20), about("local steps τ: one number, or a list with one for each client")] = 1

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        self.check_cohort(clients)
        check_counts("tau", self.tau, clients)

    def init(self, problem: BilevelProblem, clients: int = 1) -> SingleState:
        """The initial parameters of the problem; v and the momenta begin at zero."""
        return self.start(problem)

    @property
    def work(self) -> dict[str, object]:
        """The arguments of a round of local steps."""
        eta, count = self.rates, count_of(self.tau)
        return dict(
            eta_x=eta.x,
            eta_y=eta.y,
            eta_v=eta.v,
            zeta=Samples("lower", rows_of(self.batch_zeta), count),
            xi=Samples("upper", rows_of(self.batch_xi), count),
        )


@settings
class ServerRate(LocalDirections):
    """The server's own rate."""

    gamma: Annotated[
        Positive,
        about("the server's rate, as a multiple of the local step sizes; 1: the mean of the clients' s_i"),
    ] = 1.0

    @property
    def server_rates(self) -> Rates:
        """γ (α, β, ρ)"""
        return Rates(*(self.gamma * rate for rate in self.rates))


@settings
class FedBiO(LocalDirections):
    """FedBiO: the server takes the mean of the clients' s_i, which is SimFBO with γ = 1."""

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        return self.move(fed, s, fed.round(local_directions, v=s.v, **self.work), self.rates)


@settings
class SimFBO(ServerRate):
    """SimFBO: clients send the sums of their directions."""

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        return self.move(fed, s, fed.round(local_directions, v=s.v, **self.work), self.server_rates)


@settings
class ShroFBO(ServerRate):
    """ShroFBO: clients send the means of their directions, so that unequal τ_i do not weigh them."""

    def step(self, fed: Federation, s: SingleState) -> SingleState:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        x, y, v, steps = fed.round(resilient_directions, v=s.v, **self.work)
        return self.move(fed, s, Directions(steps * x, steps * y, steps * v), self.server_rates)
