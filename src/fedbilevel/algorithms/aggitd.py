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
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from jax import Array

from ..federation import Federation
from ..oracle import Oracle
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Next, Stream, Y, client_step, sgd
from ..stepsizes import Moves, Terms, automatic
from .local import AveragedHypergradient, LowerWork, State, lower_steps


class Gradients(NamedTuple):
    q: Y | None
    z: Next[Y] | None


class Descent(NamedTuple):
    y: Next[Y]
    z: Next[Y] | None


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


@settings
class AggITD(LowerWork, AveragedHypergradient):
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
        Literal["sampled", "summed"], about("sampled: the paper's random Q; summed: its mean over Q")
    ] = "sampled"

    def step(self, fed: Federation, s: State) -> State:
        """One outer iteration: 2N+3 rounds."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        y, p = self.estimate(fed, s.y)
        fed.next_phase()
        return State(self.improve(fed, p), y)

    def estimate(self, fed: Federation, y: Array, Q: int | None = None) -> tuple[Array, Array]:
        """Algorithm AggITD up to line 14: y^N and p ≈ (∇²_y g)^{-1} ∇_y f at the held x.

        By default Q is drawn at random. The clients hold y^N afterwards.
        """
        summed = self.estimator == "summed"
        Q = int(fed.rng("Q").integers(self.N + 1)) if Q is None else Q
        z: Array | None = None
        for t in range(self.N + 1):
            fed.hold(y=y)
            hessian = dict(z=z, lam=self.lam, source=summed or t == Q, xi=self.xi, u=self.u)
            if self.lower_solver == "sgd" and t < self.N:
                y, z = fed.round(descend, **hessian, **self.lower_work)
                continue
            q, z = fed.round(gradients, **hessian, last=t == self.N, zeta=self.zeta)
            if t < self.N:
                fed.note(lower_residual=q)
                y = fed.round(lower_steps, q=q, **self.lower_work).y
        assert z is not None  # the source enters at t = Q ≤ N
        return y, self.lam * (1 if summed else self.N + 1) * z
