"""local-lower: a hypergradient method for a lower level that every client has for itself (`lower_is = "local"`).

    min_x 1/m Σ_i f_i(x, y_i*(x))    subject to    y_i*(x) = argmin_y g_i(x, y)

One outer iteration is one round. With `solve = "kept"`, client i keeps y_i and v_i, and from the x that it is sent

    y_i ← y_i - β ∇_y g_i(x, y_i; ζ)                      τ_i times
    v_i ← v_i - ρ (∇²_y g_i(x, y_i; u) v_i - ∇_y f_i)     τ_i times
    h_i = ∇_x f_i(x, y_i; ξ) - ∇_x∇_y g_i(x, y_i; χ) v_i

and the server steps along the mean of the h_i. With `solve = "anew"` clients keep nothing: y_i takes its steps
from the initial y of the problem, and v_i is found by a few conjugate gradients. With several upper steps a client
moves its x_i along h_i(x_i, y_i, v_i) and sends the sum of its directions.

A client receives p numbers and sends p. On full batches with one upper step, the fixed point of "kept" is the
stationary point: y_i and v_i stay where they are only if they are solutions, whatever τ is. With several upper
steps it drifts by an order of α, as in most methods. "anew" is as exact as its y_i and v_i.

`implicit = False` leaves out v (v_i = 0): the body and the heads are then trained in turn, as FedRep does (Collins
et al., "Exploiting Shared Representations for Personalized Federated Learning", ICML 2021). That is a control, and
not a method for the bilevel problem.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

import jax
from jax import Array

from ..federation import Federation
from ..oracle import LocalOracle, own_y
from ..settings import Count, about, settings
from ..steps import Draw, Own, Sample, Samples, Stream, X, Y, client_step, solve, walk
from .local import S, SecondDerivatives, UpperWork, count_of, regions, rows_of
from .personal import OwnLower, OwnLowerWork


class KeptDirection(NamedTuple):
    h: X
    y: Own[Y]
    v: Own[Y]


class Direction(NamedTuple):
    h: X


def upper_direction(
    c: LocalOracle, y: Array, v: Array | None, alpha: Array, shared: bool, xi: Stream, chi: Draw
) -> Array:
    """Σ_k h_i(x_i^k, y, v) along upper steps from x. The first direction is taken at the held x."""

    def h(x: Array, rows: Draw) -> Array:
        direct = c.f_x(y, rows, at=x)
        return direct if v is None else direct - c.g_xy(y, v, chi, at=x)

    first = h(c.x, jax.tree.map(lambda a: a[0], xi.draws))
    if xi.active.shape[0] == 1:
        return first
    step = alpha / xi.steps if shared else alpha

    def move(carried: tuple[Array, Array], rows: Draw) -> tuple[Array, Array]:
        x, total = carried
        d = h(x, rows)
        return x - step * d, total + d

    return walk(move, (c.x - step * first, first), jax.tree.map(lambda a: a[1:], xi))[1]


@client_step
def kept_lower(
    c: LocalOracle,
    alpha: Array,
    beta: Array,
    rho: Array,
    shared: bool,
    implicit: bool,
    zeta: Stream,
    u: Stream,
    eta: Draw,
    xi: Stream,
    chi: Draw,
) -> KeptDirection:
    """Local steps of the client's own y and v, and its direction of x."""
    share = zeta.steps if shared else 1.0
    y = own_y(c, beta, shared, zeta, kept=True)
    v = c.own("v", c.y_start * 0.0)
    if implicit:
        f_y = c.f_y(y, eta)
        v = walk(lambda v, rows: v - rho / share * (c.g_yy(y, v, rows) - f_y), v, u)
    return KeptDirection(upper_direction(c, y, v if implicit else None, alpha, shared, xi, chi), y, v)


@client_step
def anew_lower(
    c: LocalOracle,
    alpha: Array,
    beta: Array,
    shared: bool,
    implicit: bool,
    products: int,
    zeta: Stream,
    u: Draw,
    eta: Draw,
    xi: Stream,
    chi: Draw,
) -> Direction:
    """The client's y by gradient steps from the start, its v by conjugate gradients, and its direction of x."""
    y = own_y(c, beta, shared, zeta, kept=False)
    v = solve(lambda v: c.g_yy(y, v, u), c.f_y(y, eta), products) if implicit else None
    return Direction(upper_direction(c, y, v, alpha, shared, xi, chi))


@settings
class LocalLower(UpperWork, OwnLowerWork, SecondDerivatives):
    """local-lower: every client has its own y, and only x is averaged."""

    solve: Annotated[
        Literal["kept", "anew"],
        about("kept: clients keep y and v and improve them in every round; anew: they keep nothing"),
    ] = "kept"
    products: Annotated[Count, about("anew: Hessian products of the conjugate gradients, at most")] = 10
    implicit: Annotated[
        bool, about("false: without the implicit part of the hypergradient (v = 0), as FedRep trains")
    ] = True

    def own_lower(self, steps: int | None = None) -> OwnLower:
        """The steps of a client to its own y."""
        shared = self.share_steps and steps is None
        return OwnLower(self.beta, self.lower_rows(steps), self.solve == "kept", shared)

    @property
    def idle(self) -> tuple[str, ...]:
        """The step sizes that are not used."""
        return () if self.solve == "kept" and self.implicit else ("rho",)

    def step(self, fed: Federation, s: S) -> S:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        work: dict[str, Any] = dict(
            self.upper_work,
            beta=self.beta,
            implicit=self.implicit,
            zeta=self.lower_rows(),
            eta=Sample("upper", rows_of(self.batch_xi)),
            chi=self.chi,
        )
        if self.solve == "kept":
            u = Samples("lower", rows_of(self.batch_u), count_of(self.tau))
            h = fed.round(kept_lower, rho=self.product_step, u=u, **work).h
        else:
            h = fed.round(anew_lower, products=self.products, u=self.u, **work).h
        fed.note(hypergradient_estimate=h)
        if self.upper is not None:
            return self.optimise(fed, s, h)
        return s._replace(x=regions(fed).x.nearest(s.x - self.alpha * h))
