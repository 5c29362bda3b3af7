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

With `memory` the server also keeps the last directions of y and their Hessian products. They come from the
conjugate gradients and from the lower rounds themselves, and give an approximation M of (∇²_y g)^{-1}
(`secants.py`). The conjugate gradients are preconditioned by M, and the lower loop is

    y ← y - M q        with  q = mean_i ∇_y G_i(x, y), a round

at most N times, and ended as soon as ||q|| is a fifth of what it was. There are no local lower steps then. M
begins with β, so β is still at most 1/L_g. It is meant for full batches and for cohorts of all clients.
"""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from ..feasible import regions_of
from ..federation import Federation, Series
from ..oracle import Oracle
from ..problem import BilevelProblem
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Next, Stream, Y, client_step, sgd
from ..stepsizes import Moves, Pairs, Terms, automatic
from ..trials import Tried
from .conjugate import solve
from .local import ImplicitHypergradient, LowerWork, S, ServerState, before, lower_gradient, lower_steps, regions
from .secants import quasi_newton, with_pair

ENOUGH = 0.2  # With a memory, lower rounds end when the gradient has this share of its first length.
WORSE = 2.0  # how many times longer it may become before y goes back


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

    carries: ClassVar[bool] = True

    N: Annotated[
        Count,
        Terms(1),
        automatic,
        Tried(1, 10),
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
    memory: Annotated[
        Annotated[int, Field(ge=0)],
        Pairs(),
        automatic,
        about("cg: Hessian products that the server keeps; lower rounds are quasi-Newton steps then, at most N"),
    ] = 0

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

    def remembers(self, problem: BilevelProblem) -> bool:
        """Whether lower rounds are quasi-Newton steps. They know no feasible set of y."""
        return self.estimator == "cg" and self.memory > 0 and regions_of(problem).y.project is None

    def newton_steps(self, fed: Federation, s: ServerState) -> ServerState:
        """At most N times y ← y - M q, from s, until ||q|| is `ENOUGH` of the first one.

        Every step gives a pair for M. If ||q|| becomes twice as large, M was that of another x: it is forgotten,
        and y goes back.
        """
        assert s.pairs is not None  # as `init` makes it for a method with a memory
        pairs, y, first = np.asarray(s.pairs), np.asarray(s.y, np.float64), 0.0
        last = y, np.zeros_like(y), 0.0
        for t in range(self.N):
            fed.hold(y=jnp.asarray(y, jnp.float32))
            reply = fed.round(lower_gradient, zeta=self.zeta).q
            fed.note(lower_residual=reply)
            q = np.asarray(reply, np.float64)
            size = float(np.linalg.norm(q))
            worse = t > 0 and not size <= WORSE * last[2]
            if worse:
                pairs = np.zeros_like(pairs)
            if t > 0:
                pairs = with_pair(pairs, y - last[0], q - last[1])
            last, first = last if worse else (y, q, size), first or size
            y = _rounded(last[0] - quasi_newton(pairs, last[1], self.beta))
            if 0 < size <= ENOUGH * first:  # replies of zeros are those of a rehearsal, which counts the most
                break
        return s._replace(y=jnp.asarray(y, jnp.float32), pairs=jnp.asarray(pairs))

    def solve(
        self, fed: Federation, y: Array, start: Array, pairs: np.ndarray | None = None
    ) -> tuple[Array, np.ndarray | None]:
        """p with mean_i ∇²_y G_i p = mean_i ∇_y F_i at the held x and y, by conjugate gradients from a start.

        The product with the start travels with the right-hand side. All vectors have only the directions in which
        y can move in its feasible set. If there are pairs, they are a preconditioner, and are returned with those
        of this system.
        """

        def free(v: Array | None) -> Array:
            assert v is not None  # only a product with a start of zero is left out
            return regions(fed).y.along(y, v)

        start, rows = free(start), dict(xi=self.xi, u=self.u)
        made = list[tuple[np.ndarray, np.ndarray]]()

        def product(d: Array) -> Array:
            w = free(fed.round(system, p=d, source=False, **rows).w)
            made.append((np.asarray(d), np.asarray(w)))
            return w

        b, w = fed.round(system, p=start if start.any() else None, source=True, **rows)
        if b is not None and b.any() and not free(b).any():  # y cannot move in any direction that matters
            return jnp.zeros_like(b), pairs
        image, enough = None if w is None else free(w), (self.cg_steps, self.cg_tolerance)
        if pairs is None:
            return solve(product, free(b), start, image, *enough), None
        p = solve(product, free(b), start, image, *enough, partial(quasi_newton, pairs, scale=self.beta))
        for pair in made:
            pairs = with_pair(pairs, *pair)
        return p, pairs

    def lower_part(self, fed: Federation, s: S, Q: int | None = None) -> tuple[S, Array]:
        """The state with y^N, and p. z has only the directions in which y^t can move in its feasible set."""
        if self.estimator == "cg":
            pairs = None
            if isinstance(s, ServerState) and s.pairs is not None and self.remembers(fed.engine.problem):
                s = self.newton_steps(fed, s)
                pairs = np.asarray(s.pairs)
            else:
                s = self.lower_loop(fed, s, self.N)
            fed.hold(y=s.y)
            last = s.p if isinstance(s, ServerState) else None
            p, pairs = self.solve(fed, s.y, jnp.zeros_like(s.y) if last is None else last, pairs)
            if isinstance(s, ServerState):
                s = s._replace(p=p, pairs=s.pairs if pairs is None else jnp.asarray(pairs))
            return s, p
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


def _rounded(v: np.ndarray) -> np.ndarray:
    """The numbers that clients are sent, which are float32."""
    return v.astype(np.float32).astype(np.float64)
