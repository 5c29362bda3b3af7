"""LFedNest (Tarzanagh et al., ICML 2022): the fully local method. Each client estimates the hypergradient from
its own Hessian and steps along it; the server averages the results.

In one outer iteration, N lower rounds give y; then every client does, τ_i times from x_i = x,

    p_i = λ Σ_{k=0}^{T} (I - λ H_i(x_i, y))^k ∇_y F_i(x_i, y; ξ)
    x_i ← x_i - α_i (∇_x F_i(x_i, y; ξ) - ∇_x∇_y G_i(x_i, y; χ) p_i)

and x⁺ is the mean of the x_i. This takes N + 1 rounds with the SGD lower solver, and 2N + 1 with SVRG. No Hessian
product crosses the network, so with heterogeneous clients the mean of the local hypergradients is not the
hypergradient.
"""

from __future__ import annotations

from typing import Annotated, Any

from jax import Array

from ..federation import Federation
from ..oracle import Oracle, hessian, moved
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Stream, client_step, repeat, sgd
from ..stepsizes import LowerRounds, Moves, Terms, alone, automatic
from ..trials import Tried
from .local import LowerWork, S, SecondDerivatives, Upper, UpperWork


@client_step
def local_upper_steps(
    c: Oracle, alpha: Array, shared: bool, T: int, lam: Array, xi: Stream, chi: Draw, u: Draw
) -> Upper:
    """Upper steps along the client's own hypergradient, estimated anew at every x_i."""

    def hypergradient(x: Array, b: Draw) -> Array:
        there, at = moved(c, x, b, chi, u)
        product = hessian(there, c.y, u, at=at)  # one forward pass for all T products

        def term(_: int, carried: tuple[Any, Any]) -> tuple[Any, Any]:
            counter, total = carried
            counter = counter - lam * product(counter)
            return counter, total + counter

        r = there.f_y(c.y, b, at=at)
        p = lam * repeat(term, (r, r), T)[1]
        return there.f_x(c.y, b, at=at) - there.g_xy(c.y, p, chi, at=at)

    return Upper(sgd(hypergradient, c.x, alpha / xi.steps if shared else alpha, xi))


@settings
class LFedNest(LowerWork, UpperWork, SecondDerivatives):
    """LFedNest: every client uses its own hypergradient, and only x and y are averaged."""

    N: Annotated[Count, LowerRounds(), automatic, about("lower rounds per outer iteration")] = 1
    T: Annotated[
        Count, Terms(1), automatic, Tried(5, 20), about("terms of the client's Neumann series beyond the first")
    ] = 5
    lam: Annotated[
        Positive, Moves.PRODUCT, alone, automatic, about("step λ of the Hessian product; at most 1/L_g")
    ] = 0.01

    def step(self, fed: Federation, s: S) -> S:
        """One outer iteration: N+1 rounds with SGD, 2N+1 with SVRG."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        s = self.lower_loop(fed, s, self.N)
        fed.next_phase()
        fed.hold(y=s.y)
        x = fed.round(local_upper_steps, T=self.T, lam=self.lam, chi=self.chi, u=self.u, **self.upper_work).x
        return self.after_upper(fed, s, x)
