"""MA-DSBO (Chen, Huang, Ma and Balasubramanian, "Decentralized Stochastic Bilevel Optimization with Improved
per-Iteration Complexity", ICML 2023): a decentralised method that forms no matrix.

Agent i has x_i, y_i and a running hypergradient r_i, and mixes with its neighbours by the weights w_ij. One outer
iteration starts from the y_i of the previous one:

    T times        y_i ← Σ_j w_ij y_j - β ∇_y g_i(x_i, y_i; ζ)
    z_i = 0        s_i = d_i = -∇_y f_i(x_i, y_i; ξ)
    N times        z_i ← Σ_j w_ij z_j - γ d_i
                   d_i ← Σ_j w_ij d_j + s_i' - s_i,    s_i' = ∇²_y g_i(x_i, y_i; u) z_i - ∇_y f_i(x_i, y_i; ξ)
    u_i = ∇_x f_i(x_i, y_i; ξ) - ∇_x∇_y g_i(x_i, y_i; χ) z_i
    x_i ← Σ_j w_ij x_j - α r_i
    r_i ← (1-θ) r_i + θ u_i                                          θ = α

where every right-hand side uses the values from before the line. d_i tracks the mean residual
1/m Σ_j (H_j z_j - ∇_y f_j), so that all z_i converge to the solution (∇²_y g)^{-1} ∇_y f of the *mean* system with
a constant γ.

x_i is known from the start, so it is sent with the first y_i. z_i is sent together with the d_i from which it was
made. The first z_i = 0 and the last d_i are never sent, so N steps take N-1 exchanges.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from ..agents import Agents
from ..errors import SettingsError
from ..federation import Federation
from ..oracle import Oracle
from ..problem import BilevelProblem
from ..settings import Count, Positive, about, settings
from ..steps import Draw, PerClient, Sample, Y, client_step
from ..stepsizes import LowerRounds, Moves, Terms, alone, automatic
from ..trials import Tried
from .graphs import Matrix, Network, own, spread
from .local import BatchSize, Hypergradient, rows_of


class MADSBOState(NamedTuple):
    """The means x and y over agents, and the agents' x, y and r, with one row for each agent."""

    x: Array
    y: Array
    xs: Array
    ys: Array
    r: Array


class Move(NamedTuple):
    y: Y


class Residual(NamedTuple):
    s: Annotated[Y, Moves.PRODUCT]


@client_step
def lower_move(c: Oracle, x: Array, y: Array, beta: Array, zeta: Draw) -> Move:
    """β ∇_y g_i(x_i, y_i; ζ)"""
    return Move(beta * c.g_y(y, zeta, at=x))


@client_step
def residual(c: Oracle, x: Array, y: Array, z: Array | None, xi: Draw, u: Draw) -> Residual:
    """∇²_y g_i(x_i, y_i; u) z_i - ∇_y f_i(x_i, y_i; ξ)"""
    r = c.f_y(y, xi, at=x)
    return Residual(-r if z is None else c.g_yy(y, z, u, at=x) - r)


@client_step
def local_hypergradient(c: Oracle, x: Array, y: Array, z: Array, xi: Draw, chi: Draw) -> Hypergradient:
    """∇_x f_i(x_i, y_i; ξ) - ∇_x∇_y g_i(x_i, y_i; χ) z_i"""
    return Hypergradient(c.f_x(y, xi, at=x) - c.g_xy(y, z, chi, at=x))


@settings
class MADSBO(Network):
    """MA-DSBO: decentralised, with Hessian-vector products and a moving average of the hypergradient."""

    alpha: Annotated[Positive, Moves.UPPER, about("upper step size α")] = 0.1
    theta: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        about("weight θ of a new hypergradient in the moving average; default: alpha, as in the paper"),
    ] = None
    T: Annotated[Count, LowerRounds(), automatic, about("lower steps per outer iteration")] = 5
    beta: Annotated[Positive, Moves.LOWER, alone, automatic, about("lower step size β")] = 0.01
    N: Annotated[
        Count, Terms(0), automatic, Tried(5, 20), about("steps on the Hessian system per outer iteration")
    ] = 5
    gamma: Annotated[
        Positive, Moves.PRODUCT, alone, automatic, about("step size γ on the Hessian system; below 1/L_g")
    ] = 0.01
    batch_zeta: Annotated[BatchSize, about("rows for the gradient of the lower loss")] = "full"
    batch_u: Annotated[BatchSize, about("rows for a Hessian product")] = "full"
    batch_xi: Annotated[BatchSize, about("rows for the gradients of the upper loss")] = "full"
    batch_chi: Annotated[BatchSize, about("rows for the mixed derivative")] = "full"

    def check(self, clients: int) -> None:
        """Raise if the graph does not fit the number of agents, or if the weight θ is above 1."""
        self.weights(clients)
        if self.theta is None and self.alpha > 1:
            raise SettingsError(
                f"alpha = {self.alpha} is wrong: it is also the weight of the moving average, which is at most 1; "
                "set theta"
            )

    def init(self, problem: BilevelProblem, clients: int = 1) -> MADSBOState:
        """The initial parameters of the problem, and hypergradients of zero."""
        x, y = problem.flat_x.vector, problem.flat_y.vector
        return MADSBOState(x, y, *(spread(a[None], clients) for a in (x, y, jnp.zeros_like(x))))

    def step(self, fed: Federation, s: MADSBOState) -> MADSBOState:
        """One outer iteration: T+N-1 exchanges."""
        agents = Agents(fed)
        W = self.weights(len(agents))
        xs, ys, r = (spread(a, len(agents)) for a in s[2:])
        x = own(xs)
        zeta = Sample("lower", rows_of(self.batch_zeta))
        mixed_x, move = xs, jnp.zeros_like(ys)
        for t in range(self.T):
            move = agents.each(lower_move, x=x, y=own(ys), beta=self.beta, zeta=zeta).y
            mixed = agents.exchange("mix_lower", W, y=ys, **({"x": xs} if t == 0 else {}))
            ys, mixed_x = mixed["y"] - move, mixed.get("x", mixed_x)
        y = own(ys)
        z = self.inverse_product(agents, W, x, y)
        xi, chi = Sample("upper", rows_of(self.batch_xi)), Sample("lower", rows_of(self.batch_chi))
        u = agents.each(local_hypergradient, x=x, y=y, z=own(z), xi=xi, chi=chi).h
        fed.note(hypergradient_estimate=u.mean(0), lower_residual=move.mean(0) / self.beta)
        xs, r = _outer(mixed_x, r, u, self.alpha, self.alpha if self.theta is None else self.theta)
        return MADSBOState(xs.mean(0), ys.mean(0), xs, ys, r)

    def inverse_product(self, agents: Agents, W: Matrix, x: PerClient, y: PerClient) -> Array:
        """z_i ≈ (1/m Σ_j ∇²_y g_j)^{-1} 1/m Σ_j ∇_y f_j at the agents' x and y, after N steps from zero."""
        rows = dict(xi=Sample("upper", rows_of(self.batch_xi)), u=Sample("lower", rows_of(self.batch_u)))
        s = d = agents.each(residual, x=x, y=y, z=None, **rows).s
        z = -self.gamma * d  # the first step: z_i = 0 needs no mixing
        for _ in range(1, self.N):
            new = agents.each(residual, x=x, y=y, z=own(z), **rows).s
            mixed = agents.exchange("mix_product", W, z=z, d=d)
            d, s = mixed["d"] + new - s, new
            z = mixed["z"] - self.gamma * d
        return z


@jax.jit
def _outer(mixed: Array, r: Array, u: Array, alpha: float, theta: float) -> tuple[Array, Array]:
    return mixed - alpha * r, (1 - theta) * r + theta * u
