"""Naive federated ITD: iterative differentiation carried over to a federation without change, which is what
Section 2.2 of Xiao and Ji ("Communication-Efficient Federated Hypergradient Computation via Aggregated Iterative
Differentiation", ICML 2023) argues against before it introduces AggITD.

ITD takes the derivative of f(x, y^N(x)) for the N steps y^{t+1} = y^t - λ ∇_y g(x, y^t) that led to y^N. With the
sum and the product of the paper's equation,

    h = ∇_x f(x, y^N) - λ Σ_{t=0}^{N-1} ∇_x∇_y g(x, y^t) Π_{j=t+1}^{N-1} (I - λ ∇²_y g(x, y^j)) ∇_y f(x, y^N)

Every product begins at ∇_y f(x, y^N), so nothing of h can be computed before the lower loop has ended. One outer
iteration has a forward loop of N times One-Round-Lower, in which the server keeps y^0, ..., y^N, and a backward
loop:

    h   = 1/|S| Σ_i ∇_x F_i(x, y^N; ξ_i),    v^N = 1/|S| Σ_i ∇_y F_i(x, y^N; ξ_i)
    h  ← h - λ/|S| Σ_i ∇_x∇_y G_i(x, y^t; χ_i) v^{t+1}                       t = N-1, ..., 0
    v^t = 1/|S| Σ_i (v^{t+1} - λ ∇²_y G_i(x, y^t; u_i) v^{t+1})              t = N-1, ..., 1

and then One-Round-Upper along h: 3N + 2 rounds, or 2N + 2 with the SGD lower solver. The clients hold y^N only,
so the server sends y^t again in the backward loop. With p floats in x and q in y, a client sends (N+2) p + 3N q
floats and is sent 2p + (4N+1) q.

h is the exact derivative of f(x, y^N(x)) if λ = β, the batches are full and a lower round is one local step. With
τ local steps a round it is, as in the other methods, an estimate of the hypergradient for any λ ≤ 1/L_g.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

from jax import Array

from ..federation import Federation
from ..oracle import Oracle
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Next, X, Y, client_step
from ..stepsizes import Moves
from ..trials import Tried
from .local import AveragedHypergradient, LowerWork, S, regions


class EndGradients(NamedTuple):
    h: X
    v: Y


class BackwardProducts(NamedTuple):
    w: X
    v: Next[Y] | None


@client_step
def end_gradients(c: Oracle, xi: Draw) -> EndGradients:
    """Both gradients of the upper loss at the end of the lower loop: ∇_x F_i and ∇_y F_i at (x, y^N)."""
    return EndGradients(c.f_x(c.y, xi), c.f_y(c.y, xi))


@client_step
def backward_products(
    c: Oracle, y: Array, v: Array, lam: Array, last: bool, chi: Draw, u: Draw
) -> BackwardProducts:
    """w_i = ∇_x∇_y G_i(x, y^t; χ_i) v and v - λ ∇²_y G_i(x, y^t; u_i) v. At t = 0 the second one is not needed."""
    return BackwardProducts(c.g_xy(y, v, chi), None if last else v - lam * c.g_yy(y, v, u))


@settings
class NaiveITD(LowerWork, AveragedHypergradient):
    """Naive federated ITD: a loop forwards along the lower iterates, and a second one backwards."""

    N: Annotated[
        Count, Tried(1, 10), about("lower rounds per outer iteration, and rounds of the backward loop")
    ] = 1
    lam: Annotated[Positive, Moves.PRODUCT, about("step λ of the products; at most 1/L_g")] = 0.01

    def step(self, fed: Federation, s: S) -> S:
        """One outer iteration: 3N+2 rounds."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        path = [s.y]
        for _ in range(self.N):
            s = self.lower_loop(fed, s, 1)
            path.append(s.y)
        fed.next_phase()
        drawn = fed.ledger.rounds
        return self.follow(fed, s, self.differentiate(fed, path), drawn)

    def differentiate(self, fed: Federation, path: list[Array]) -> Array:
        """The hypergradient h for the path y^0, ..., y^N at the held x. The clients hold y^N afterwards.

        A coordinate of y^{t+1} that is at a bound does not depend on y^t, so v^{t+1} is restricted to the others.
        """
        fed.hold(y=path[-1])
        v: Array | None
        h, v = fed.round(end_gradients, xi=self.xi)
        for t in reversed(range(len(path) - 1)):
            assert v is not None  # it is left out at t = 0 only
            rows, v = dict(chi=self.chi, u=self.u), regions(fed).y.along(path[t + 1], v)
            w, v = fed.round(backward_products, y=path[t], v=v, lam=self.lam, last=t == 0, **rows)
            h = h - self.lam * w
        return h
