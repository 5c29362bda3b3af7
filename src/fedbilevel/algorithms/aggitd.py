"""FBO-AggITD (Xiao and Ji, "Communication-Efficient Federated Hypergradient Computation via Aggregated
Iterative Differentiation", ICML 2023).

One outer iteration, with the cohort S and the N lower rounds y^0 = y, ..., y^N:

    z^Q = 1/|S| Σ_i ∇_y F_i(x, y^Q; ξ_i)                                   Q uniform on {0, ..., N}
    z^t = 1/|S| Σ_i (z^{t-1} - λ ∇²_y G_i(x, y^t; u_i) z^{t-1})             t = Q+1, ..., N
    p   = λ (N+1) z^N                                                      ≈ (∇²_y g)^{-1} ∇_y f
    h   = 1/|S| Σ_i (∇_x F_i(x, y^N; ξ_i) - ∇_x∇_y G_i(x, y^N; χ_i) p)

The Hessian products travel in the same rounds as the gradients of the lower loop: 2N+3 rounds in all.

The paper's text prints the line for z without λ and p with z^{N-1}; the proofs and the formula for the
Hessian-inverse-vector product have what stands above, and so does this file.

`estimator="summed"` is ours. It carries  s^t = (I - λ H(y^t)) s^{t-1} + ∇_y f(x, y^t)  and takes p = λ s^N,
which is the expectation of the sampled p over Q: the same rounds, no variance from Q, and the vector z in
every round where the sampled estimator sends it only from t = Q on.
"""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from jax import Array
from pydantic import Field

from ..errors import SettingsError
from ..federation import Federation, cohort_size
from ..oracle import Oracle
from ..problem import Problem
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Epochs, PerClient, Sample, Samples, Stream, Y, client_step, sgd
from .local import hypergradient, lower_steps, upper_steps

BatchSize = Count | Literal["full"]
Steps = Count | Annotated[tuple[Count, ...], Field(min_length=1)]


class Gradients(NamedTuple):
    q: Y | None
    z: Y | None


class Descent(NamedTuple):
    y: Y
    z: Y | None


class State(NamedTuple):
    """Where an outer iteration starts: the warm start of the lower problem is y."""

    x: Array
    y: Array


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
    """Lines 4-6 of Algorithm AggITD. At t = N no q is computed or sent."""
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
class AggITD:
    """FBO-AggITD: federated bilevel optimisation with aggregated iterative differentiation."""

    N: Annotated[Count, about("lower rounds an outer iteration, and the length of the Hessian product")] = 1
    alpha: Annotated[Positive, about("upper step size α")] = 0.01
    beta: Annotated[Positive, about("lower step size β")] = 0.003
    lam: Annotated[Positive, about("step λ of the Hessian product; at most 1/L_g")] = 0.01
    estimator: Annotated[
        Literal["sampled", "summed"], about("sampled: the paper's random Q; summed: its mean over Q")
    ] = "sampled"
    lower_solver: Annotated[
        Literal["svrg", "sgd"], about("lower local steps with or without the SVRG correction q")
    ] = "svrg"
    participation: Annotated[
        Count | Annotated[float, Field(gt=0, le=1)],
        about("clients an outer iteration: a whole number, or a share such as 0.1; 1.0 is all of them"),
    ] = 0.1
    lower_epochs: Annotated[
        Count, about("lower local work, in passes over the client's rows; unless lower_steps is given")
    ] = 5
    lower_steps: Annotated[
        Steps | None, about("lower local steps τ instead: one number, or a list with one for each client")
    ] = None
    upper_steps: Annotated[Steps, about("upper local steps τ: one number, or a list with one for each client")] = 1
    share_steps: Annotated[
        bool, about("divide the step sizes among the local steps: α/τ_i and β/τ_i, as in the theory")
    ] = False
    batch_zeta: Annotated[BatchSize, about("rows for the gradient q of the lower loss")] = "full"
    batch_zeta_local: Annotated[BatchSize, about("rows for a lower local step")] = 10
    batch_u: Annotated[BatchSize, about("rows for a Hessian product")] = "full"
    batch_xi: Annotated[BatchSize, about("rows for the gradients of the upper loss")] = "full"
    batch_xi_local: Annotated[BatchSize, about("rows for an upper local step")] = "full"
    batch_chi: Annotated[BatchSize, about("rows for the mixed derivative")] = "full"

    def check(self, clients: int) -> None:
        """Raise if a setting does not fit the number of registered clients."""
        cohort_size(self.participation, clients)
        for name in ("lower_steps", "upper_steps"):
            steps = getattr(self, name)
            if isinstance(steps, tuple) and len(steps) != clients:
                raise SettingsError(
                    f"{name} has {len(steps)} numbers for {clients} clients; give one number, or one for each"
                )

    def init(self, problem: Problem) -> State:
        return State(problem.flat_x.vector, problem.flat_y.vector)

    def step(self, fed: Federation, s: State) -> State:
        """One outer iteration."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x)
        y, p = self.estimate(fed, s.y)
        h = fed.round(
            hypergradient,
            p=p,
            xi=Sample("upper", _rows(self.batch_xi)),
            chi=Sample("lower", _rows(self.batch_chi)),
        ).h
        x = fed.round(
            upper_steps,
            h=h,
            alpha=self.alpha,
            shared=self.share_steps,
            xi=Samples("upper", _rows(self.batch_xi_local), _count(self.upper_steps)),
        ).x
        return State(x, y)

    def estimate(self, fed: Federation, y: Array, Q: int | None = None) -> tuple[Array, Array]:
        """Algorithm AggITD up to line 14: y^N and p ≈ (∇²_y g)^{-1} ∇_y f at the held x.

        Q is drawn at random when it is left out; the clients hold y^N afterwards.
        """
        summed = self.estimator == "summed"
        Q = int(fed.rng("Q").integers(self.N + 1)) if Q is None else Q
        z: Array | None = None
        for t in range(self.N + 1):
            fed.hold(y=y)
            hessian = dict(
                z=z,
                lam=self.lam,
                source=summed or t == Q,
                xi=Sample("upper", _rows(self.batch_xi)),
                u=Sample("lower", _rows(self.batch_u)),
            )
            if self.lower_solver == "sgd" and t < self.N:
                y, z = fed.round(descend, **hessian, **self._lower_work)
                continue
            q, z = fed.round(gradients, **hessian, last=t == self.N, zeta=Sample("lower", _rows(self.batch_zeta)))
            if t < self.N:
                y = fed.round(lower_steps, q=q, **self._lower_work).y
        assert z is not None  # the source enters at some t ≤ N
        return y, self.lam * (1 if summed else self.N + 1) * z

    @property
    def _lower_work(self) -> dict[str, object]:
        rows = _rows(self.batch_zeta_local)
        if self.lower_steps is None:
            work: object = Epochs("lower", rows, self.lower_epochs)
        else:
            work = Samples("lower", rows, _count(self.lower_steps))
        return dict(beta=self.beta, shared=self.share_steps, zeta=work)


def _rows(size: int | str) -> int | None:
    return None if isinstance(size, str) else size


def _count(steps: int | tuple[int, ...]) -> int | PerClient:
    return PerClient(steps) if isinstance(steps, tuple) else steps
