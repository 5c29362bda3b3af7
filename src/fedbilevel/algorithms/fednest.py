"""FedNest (Tarzanagh, Li, Thrampoulidis and Oymak, "FedNest: Federated Bilevel, Minimax, and Compositional
Optimization", ICML 2022): the AID-based estimator, in a separate loop after the lower loop.

In one outer iteration, N times One-Round-Lower, of two rounds each, gives y = y^N; then come

    p_0 = λT/|S| Σ_i ∇_y F_i(x, y; ξ_i)
    p_t = 1/|S| Σ_i (p_{t-1} - λ ∇²_y G_i(x, y; u_i) p_{t-1})           t = 1, ..., T
    h   = 1/|S| Σ_i (∇_x F_i(x, y; ξ_i) - ∇_x∇_y G_i(x, y; χ_i) p_T')    T' uniform on {0, ..., T-1}

and One-Round-Upper along h: 2N + T + 3 rounds. The loop is charged T rounds, as in the paper. A server that draws
T' first may end the loop there (`stop_early`), which takes 2N + T' + 3 rounds. `estimator="summed"` takes the mean
of p_0, ..., p_{T-1} at the server, which is the expectation over T', at no cost in communication.

`mode="released_code"` computes what the published scripts compute. There each client keeps its own Neumann
counter, c_i ← (I - λ H_i) c_i from c_i = p_0, which is never averaged. The list of replies p + c_i is not cleared
between rounds, so its mean over k rounds is p_k = p_{k-1} + c̄_k / k. With λ equal to the outer step:

    p = λ (p_0 + Σ_{k=1}^{T} 1/k · 1/|S| Σ_i (I - λ H_i)^k p_0),    p_0 = 1/|S| Σ_i ∇_y F_i

As in the scripts, every lower round and the upper part each draw their own cohort.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array

from ..errors import SettingsError
from ..federation import Federation, Series
from ..oracle import Oracle
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Next, Y, client_step, repeat
from ..stepsizes import LowerRounds, Moves, Terms, automatic
from ..trials import Tried
from .local import ImplicitHypergradient, LowerWork, S, regions


class UpperGradient(NamedTuple):
    r: Y


class HessianProduct(NamedTuple):
    p: Next[Y]


@client_step
def upper_gradient(c: Oracle, xi: Draw) -> UpperGradient:
    """r_i = ∇_y F_i(x, y; ξ_i)"""
    return UpperGradient(c.f_y(c.y, xi))


@client_step
def hessian_product(c: Oracle, p: Array, lam: Array, u: Draw) -> HessianProduct:
    """p_i = p - λ ∇²_y G_i(x, y; u_i) p"""
    return HessianProduct(p - lam * c.g_yy(c.y, p, u))


@client_step
def neumann_counter(c: Oracle, p: Array, k: Array, lam: Array, u: Draw) -> HessianProduct:
    """p_i = p + c_i with the client's own counter c_i = (I - λ H_i)^k p_0, from the held p_0."""
    counter = repeat(lambda t, v: v - lam * c.g_yy(c.y, v, u.apart(t)), c.held("p_0"), k)
    return HessianProduct(p + counter)


@settings
class FedNest(LowerWork, ImplicitHypergradient):
    """FedNest: the AID-based hypergradient, in a separate communication loop."""

    N: Annotated[Count, LowerRounds(), automatic, about("lower rounds per outer iteration")] = 1
    T: Annotated[Count, Terms(0), automatic, Tried(5, 20), about("rounds of the Hessian loop")] = 5
    lam: Annotated[
        Positive,
        Moves.PRODUCT,
        automatic,
        about("step λ of the Hessian product; released_code uses alpha instead"),
    ] = 0.01
    estimator: Annotated[
        Literal["sampled", "summed"], about("paper mode, sampled: p at the random T'; summed: its mean over T'")
    ] = "sampled"
    mode: Annotated[
        Literal["paper", "released_code"], about("the published algorithm, or what its scripts compute")
    ] = "paper"
    stop_early: Annotated[bool, about("paper mode: end the Hessian loop at the random T'")] = False

    def step(self, fed: Federation, s: S) -> S:
        """One outer iteration: 2N+T+3 rounds."""
        return self._published(fed, s) if self.mode == "paper" else self._released(fed, s)

    def _published(self, fed: Federation, s: S) -> S:
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        s = self.lower_loop(fed, s, self.N)
        fed.next_phase()
        fed.hold(y=s.y)
        return self.improve(fed, s, self.estimate(fed, y=s.y))

    def estimate(self, fed: Federation, T_drawn: int | None = None, y: Array | None = None) -> Array:
        """FedIHGP: p_T' ≈ (∇²_y g)^{-1} ∇_y f at the held x and y. By default T' is drawn at random.

        If the y that is held is given, p has only the directions in which it can move in its feasible set.
        """

        def free(p: Array) -> Array:
            return p if y is None else regions(fed).y.along(y, p)

        chosen = int(fed.rng("T'").integers(self.T)) if T_drawn is None else T_drawn
        p = free(self.lam * self.T * fed.round(upper_gradient, xi=self.xi).r)
        terms = [p]
        summed = self.estimator == "summed"
        for _ in range(chosen if self.stop_early and not summed else self.T):
            p = free(fed.round(hessian_product, p=p, lam=self.lam, u=self.u).p)
            terms.append(p)
        fed.show_series(Series(terms[0], terms[-1], len(terms) - 1))
        return sum(terms[1 : self.T], start=terms[0]) / self.T if summed else terms[chosen]

    def _released(self, fed: Federation, s: S) -> S:
        if regions(fed).y.project is not None:
            raise SettingsError(
                "algorithm.mode = 'released_code' is wrong with feasible_y: the published scripts have no "
                "such set; use mode = 'paper'"
            )
        for _ in range(self.N):
            cohort = fed.cohort(self.participation)
            cohort.hold(x=s.x)
            s = self.lower_loop(cohort, s, 1)
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        return self.improve(fed, s, self.released_estimate(fed))

    def released_estimate(self, fed: Federation) -> Array:
        """The estimate of (∇²_y g)^{-1} ∇_y f in the published scripts, at the held x and y."""
        p_0 = fed.round(upper_gradient, xi=self.xi).r
        p = p_0
        fed.hold(p_0=p_0)
        for k in range(1, self.T + 1):
            replies = fed.round(neumann_counter, p=p, k=jnp.int32(k), lam=self.alpha, u=self.u).p
            p = p + (replies - p) / k
        fed.release("p_0")
        return self.alpha * p
