"""Gossip-based DSBO (Yang, Zhang and Wang, "Decentralized Gossip-Based Stochastic Bilevel Optimization over
Communication Networks", NeurIPS 2022, Algorithm 1).

There is no server. Agent k has x^k, y^k and running estimates of the mean derivatives, and mixes all of them with
those of its neighbours by the weights w_kj. With the derivatives sampled at (x^k, y^k), one outer iteration is

    x^k ← Σ_j w_kj x^j - α (s^k - u^k p^k)                           p^k = 1/L_g Q_b h^k ≈ (∇²_y g)^{-1} ∇_y f
    y^k ← Σ_j w_kj y^j - γ ∇_y g^k(ζ)
    s^k ← (1-β) Σ_j w_kj s^j + β ∇_x f^k(ξ)                          h^k the same with ∇_y f^k(ξ)
    u^k ← (1-β) Σ_j w_kj u^j + β ∇_x∇_y g^k(χ)                       size_x x size_y
    v_i^k ← (1-β) Σ_j w_kj v_i^j + β ∇²_y g^k(u_i)    i = 1..b        size_y x size_y each
    Q_0 = I,   Q_i = I + (I - v_i^k / L_g) Q_{i-1}    i = 1..b

where every right-hand side uses the values from before the iteration. Only Q_b h is needed, which takes b products
of a matrix and a vector: w_0 = h, w_i = h + (I - v_i/L_g) w_{i-1}. On full batches the v_i are equal, and only one
of them is kept.

An agent sends everything in one exchange. Most of the cost is the matrices; `MADSBO` is a method without them.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from pydantic import Field

from ..agents import Agents
from ..errors import SettingsError
from ..federation import Federation
from ..oracle import Oracle, hessian_matrices, mixed_matrix
from ..problem import BilevelProblem
from ..settings import Count, Positive, about, settings
from ..steps import XY, YY, Draw, Sample, Samples, Stream, X, Y, client_step
from ..stepsizes import Inverse, Moves
from ..trials import Tried
from .graphs import Network, own, spread
from .local import BatchSize, rows_of

COPIES = 4  # the copies of the matrices while a step runs: before, mixed, sampled, after


class GossipState(NamedTuple):
    """The means x and y over agents, and everything that the agents keep, with one row for each agent."""

    x: Array
    y: Array
    xs: Array
    ys: Array
    s: Array
    h: Array
    u: Array
    v: Array


class Sampled(NamedTuple):
    g_y: Y
    s: X
    h: Y
    u: XY
    v: YY


@client_step
def sample_derivatives(c: Oracle, x: Array, y: Array, zeta: Draw, xi: Draw, chi: Draw, u: Stream) -> Sampled:
    """∇_y g, ∇_x f, ∇_y f, and the matrices ∇_x∇_y g and ∇²_y g (for each draw of u) at the agent's x and y."""
    jacobian, hessians = mixed_matrix(c, y, chi, at=x), hessian_matrices(c, y, u, at=x)
    return Sampled(c.g_y(y, zeta, at=x), c.f_x(y, xi, at=x), c.f_y(y, xi, at=x), jacobian, hessians)


@settings
class Gossip(Network):
    """Gossip-based DSBO: agents track gradients, Jacobians and Hessians as matrices."""

    alpha: Annotated[Positive, Moves.UPPER, about("upper step size α")] = 0.01
    beta: Annotated[
        Annotated[float, Field(gt=0, le=1)], about("weight β of a new sample in the running estimates")
    ] = 0.1
    gamma: Annotated[Positive, Moves.LOWER, about("lower step size γ")] = 0.01
    b: Annotated[Count, Tried(5, 20), about("terms of the series for the inverse Hessian beyond the first")] = 10
    L_g: Annotated[
        Positive, Inverse(Moves.PRODUCT), about("bound on the norm of the Hessian of the lower loss in y")
    ] = 10.0
    mu_g: Annotated[
        Annotated[float, Field(ge=0)],
        about("the running Hessians start at mu_g times the identity, as in the paper"),
    ] = 0.0
    memory_limit: Annotated[Count, about("MB for the matrices of all agents; larger runs are refused")] = 2048
    batch_zeta: Annotated[BatchSize, about("rows for the gradient of the lower loss")] = "full"
    batch_u: Annotated[BatchSize, about("rows for a Hessian; a number: b Hessians are kept and sent")] = "full"
    batch_xi: Annotated[BatchSize, about("rows for the gradients of the upper loss")] = "full"
    batch_chi: Annotated[BatchSize, about("rows for the mixed derivative")] = "full"

    def check(self, clients: int) -> None:
        """Raise if the graph does not fit the number of agents, or if the bounds on the Hessian contradict."""
        self.weights(clients)
        if self.mu_g > self.L_g:
            raise SettingsError(f"mu_g = {self.mu_g} is wrong: it must be at most L_g, which is {self.L_g}")

    def init(self, problem: BilevelProblem, clients: int = 1) -> GossipState:
        """The initial parameters of the problem, and estimates of zero; raises if they do not fit the memory."""
        self.check_memory(problem, clients)
        x, y = problem.flat_x.vector, problem.flat_y.vector
        p, q = x.size, y.size
        start = jnp.broadcast_to(self.mu_g * jnp.eye(q), (self.hessians, q, q))
        rows = (x, y, jnp.zeros(p), jnp.zeros(q), jnp.zeros((p, q)), start)
        return GossipState(x, y, *(spread(a[None], clients) for a in rows))

    def step(self, fed: Federation, s: GossipState) -> GossipState:
        """One outer iteration: one exchange."""
        agents = Agents(fed)
        count = len(agents)
        self.check_memory(fed.engine.problem, count)
        xs, ys, *tracked = (spread(a, count) for a in s[2:])
        old = dict(zip(("s", "h", "u", "v"), tracked, strict=True))
        new = agents.each(
            sample_derivatives,
            x=own(xs),
            y=own(ys),
            zeta=Sample("lower", rows_of(self.batch_zeta)),
            xi=Sample("upper", rows_of(self.batch_xi)),
            chi=Sample("lower", rows_of(self.batch_chi)),
            u=Samples("lower", rows_of(self.batch_u), self.hessians),
        )
        mixed = agents.exchange("mix", self.weights(count), x=xs, y=ys, **old)
        h = _hypergradient(old["s"], old["h"], old["u"], old["v"], self.L_g, self.b)
        fed.note(hypergradient_estimate=h.mean(0), lower_residual=new.g_y.mean(0))
        xs, ys = mixed["x"] - self.alpha * h, mixed["y"] - self.gamma * new.g_y
        after = [_average(mixed[name], getattr(new, name), self.beta) for name in old]
        return GossipState(xs.mean(0), ys.mean(0), xs, ys, *after)

    @property
    def hessians(self) -> int:
        """The number of Hessians that an agent keeps: b, or one if all of them are on all rows and so equal."""
        return 1 if self.batch_u == "full" else self.b

    def check_memory(self, problem: BilevelProblem, clients: int) -> None:
        """Raise if the agents' matrices do not fit `memory_limit`."""
        p, q = problem.size_x, problem.size_y
        size = COPIES * 4 * clients * (p * q + self.hessians * q * q)
        if size > self.memory_limit * 10**6:
            agents = f"{clients} agents" if clients > 1 else "a single agent"
            raise SettingsError(
                f"memory_limit = {self.memory_limit} MB is too small: {agents} with a Jacobian of {p} x {q} and "
                f"{self.hessians} Hessian{'s' * (self.hessians > 1)} of {q} x {q} each need {size / 1e9:.3g} GB "
                f"({COPIES} copies while a step runs); use ma-dsbo, which keeps no matrix, a smaller problem, "
                "or a higher limit"
            )


@partial(jax.jit, static_argnums=5)
def _hypergradient(s: Array, h: Array, u: Array, v: Array, L_g: float, b: int) -> Array:
    """s - u Q_b h / L_g for every agent."""
    w = h
    for i in range(b):
        w = h + w - jnp.einsum("kij,kj->ki", v[:, i % v.shape[1]], w) / L_g
    return s - jnp.einsum("kij,kj->ki", u, w) / L_g


@jax.jit
def _average(mixed: Array, new: Array, beta: float) -> Array:
    return (1 - beta) * mixed + beta * new
