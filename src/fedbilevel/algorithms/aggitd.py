"""FBO-AggITD (Xiao and Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated
Iterative Differentiation", ICML 2023).

One outer iteration, with the cohort S and the N lower rounds y^0 = y, ..., y^N:

    z^Q = 1/|S| Σ_i ∇_y F_i(x, y^Q; ξ_i)                                   Q uniform on {0, ..., N}
    z^t = 1/|S| Σ_i (z^{t-1} - λ ∇²_y G_i(x, y^t; u_i) z^{t-1})             t = Q+1, ..., N
    p   = λ (N+1) z^N                                                      ≈ (∇²_y g)^{-1} ∇_y f
    h   = 1/|S| Σ_i (∇_x F_i(x, y^N; ξ_i) - ∇_x∇_y G_i(x, y^N; χ_i) p)

The Hessian products travel in the same rounds as the gradients of the lower loop: 2N+3 rounds in all.

The paper's text prints the line for z without λ, and p with z^{N-1}. The lines above are those of the proofs and
of the formula for the Hessian-inverse-vector product, and this file follows them.

`estimator="summed"` is ours. It carries  s^t = (I - λ H(y^t)) s^{t-1} + ∇_y f(x, y^t)  and takes p = λ s^N,
which is the expectation of the sampled p over Q. It needs the same rounds and has no variance from Q, but it sends
the vector z in every round, whereas the sampled estimator sends it only from t = Q on.

`estimator="cg"` is for badly conditioned lower problems, where the series would need N of the order of the
condition number. After the lower loop the server solves  mean_i ∇²_y G_i(x, y^N) p = mean_i ∇_y F_i(x, y^N)  by
conjugate gradients, from the p of the iteration before. Every product is a round: 2N+3+T rounds for T products.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from ..federation import Federation, Series
from ..oracle import Oracle
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Next, Stream, Y, client_step, sgd
from ..stepsizes import Moves, Terms, automatic
from .conjugate import solve
from .local import ImplicitHypergradient, LowerWork, S, ServerState, before, lower_steps, regions


class Gradients(NamedTuple):
    q: Y | None
    z: Next[Y] | None


class Descent(NamedTuple):
    y: Next[Y]
    z: Next[Y] | None


class System(NamedTuple):
    b: Y | None
    w: Y | None


def carry(c: Oracle, z: Array | None, lam: Array, source: bool, xi: Draw, u: Draw) -> Array | None:
    """Lines 5-6 of Algorithm AggITD: z ← z - λ ∇²_y G_i z, and ∇_y F_i where it enters."""
    z = None if z is None else z - lam * c.g_yy(c.y, z, u)
    if not source:
        return z
    r = c.f_y(c.y, xi)
    return r if z is None else z + r


@client_step
def gradients(
    c: Oracle, z: Array | None, lam: Array, source: bool, last: bool, zeta: Draw, xi: Draw, u: Draw
) -> Gradients:
    """Lines 4-6 of Algorithm AggITD. At t = N, q is neither computed nor sent."""
    return Gradients(None if last else c.g_y(c.y, zeta), carry(c, z, lam, source, xi, u))


@client_step
def descend(
    c: Oracle,
    z: Array | None,
    lam: Array,
    source: bool,
    beta: Array,
    shared: bool,
    zeta: Stream,
    xi: Draw,
    u: Draw,
) -> Descent:
    """The SGD lower solver needs no q: its local steps and the Hessian product at y^t share a round."""
    step = beta / zeta.steps if shared else beta
    return Descent(sgd(c.g_y, c.y, step, zeta), carry(c, z, lam, source, xi, u))


@client_step
def system(c: Oracle, p: Array | None, source: bool, xi: Draw, u: Draw) -> System:
    """Both sides of ∇²_y G_i p = ∇_y F_i at (x, y): the product, and the right-hand side if it is asked for."""
    return System(c.f_y(c.y, xi) if source else None, None if p is None else c.g_yy(c.y, p, u))


@settings
class AggITD(LowerWork, ImplicitHypergradient):
    """FBO-AggITD: federated bilevel optimisation with aggregated iterative differentiation."""

    N: Annotated[
        Count,
        Terms(1),
        automatic,
        about("lower rounds per outer iteration, and the length of the Hessian product"),
    ] = 1
    lam: Annotated[Positive, Moves.PRODUCT, automatic, about("step λ of the Hessian product; at most 1/L_g")] = (
        0.01
    )
    estimator: Annotated[
        Literal["sampled", "summed", "cg"],
        about("sampled: the paper's random Q; summed: its mean over Q; cg: conjugate gradients, without λ"),
    ] = "sampled"
    cg_steps: Annotated[Count, about("cg: the most Hessian products in an outer iteration, a round each")] = 20
    cg_tolerance: Annotated[
        Annotated[float, Field(gt=0, lt=1)], about("cg: the residual that is small enough, as a share of ∇_y f")
    ] = 1e-3

    def step(self, fed: Federation, s: S) -> S:
        """One outer iteration: 2N+3 rounds, and those of the products with conjugate gradients."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        s, p = self.lower_part(fed, s)
        fed.next_phase()
        return self.improve(fed, s, p)

    def estimate(self, fed: Federation, y: Array, Q: int | None = None) -> tuple[Array, Array]:
        """Algorithm AggITD up to line 14: y^N and p ≈ (∇²_y g)^{-1} ∇_y f at the held x.

        By default Q is drawn at random. The clients hold y^N afterwards.
        """
        start = ServerState(y, y, before=y if self.momentum_y else None)  # x is held, and not read again
        s, p = self.lower_part(fed, start, Q)
        return s.y, p

    def solve(self, fed: Federation, y: Array, start: Array) -> Array:
        """p with mean_i ∇²_y G_i p = mean_i ∇_y F_i at the held x and y, by conjugate gradients from a start.

        The product with the start travels with the right-hand side. All vectors have only the directions in which
        y can move in its feasible set.
        """

        def free(v: Array | None) -> Array:
            assert v is not None  # only a product with a start of zero is left out
            return regions(fed).y.along(y, v)

        start, rows = free(start), dict(xi=self.xi, u=self.u)
        b, w = fed.round(system, p=start if start.any() else None, source=True, **rows)
        if b is not None and b.any() and not free(b).any():  # y cannot move in any direction that matters
            return jnp.zeros_like(b)
        return solve(
            lambda d: free(fed.round(system, p=d, source=False, **rows).w),
            free(b),
            start,
            None if w is None else free(w),
            self.cg_steps,
            self.cg_tolerance,
        )

    def lower_part(self, fed: Federation, s: S, Q: int | None = None) -> tuple[S, Array]:
        """The state with y^N, and p. z has only the directions in which y^t can move in its feasible set."""
        if self.estimator == "cg":
            s = self.lower_loop(fed, s, self.N)
            fed.hold(y=s.y)
            last = s.p if isinstance(s, ServerState) else None
            p = self.solve(fed, s.y, jnp.zeros_like(s.y) if last is None else last)
            return s._replace(p=p) if isinstance(s, ServerState) else s, p
        summed, free = self.estimator == "summed", regions(fed).y.along
        Q = int(fed.rng("Q").integers(self.N + 1)) if Q is None else Q
        z: Array | None = None
        first: Array | None = None
        for t in range(self.N + 1):
            fed.hold(y=s.y)
            hessian = dict(z=z, lam=self.lam, source=summed or t == Q, xi=self.xi, u=self.u)
            if self.lower_solver == "sgd" and t < self.N:
                y, z = fed.round(descend, **hessian, **self.lower_work)
            else:
                q, z = fed.round(gradients, **hessian, last=t == self.N, zeta=self.zeta)
            z = None if z is None else free(s.y, z)
            first = z if first is None else first
            if t < self.N:
                if self.lower_solver == "svrg":
                    fed.note(lower_residual=q)
                    y = fed.round(lower_steps, q=q, **self.lower_work).y
                s = self.arrived(s, self.landed(fed, y, s.y, before(s)))
        assert z is not None and first is not None  # the source enters at t = Q ≤ N
        fed.show_series(Series(first, z, self.N if summed else self.N - Q, summed))
        return s, self.lam * (1 if summed else self.N + 1) * z
