"""q-FedAvg (Li, Sanjabi, Beirami and Smith, "Fair Resource Allocation in Federated Learning", ICLR 2020), which is
a control of fair training: it needs no weights of clients and no second level.

    min_w 1/m Σ_i F_i(w)^{q+1} / (q+1)

F_i is a loss of client i with one of the levels as it began:

    upper-only    w = x and F_i(x) = f_i(x, y)
    lower-only    w = y and F_i(y) = g_i(x, y)

An outer iteration is one round. A client makes τ steps of size η along ∇F_i, from w to w_i. With L = 1/η,

    Δw_i = L (w - w_i)    Δ_i = F_i(w)^q Δw_i    h_i = q F_i(w)^{q-1} ||Δw_i||² + L F_i(w)^q
    w ← w - Σ_i Δ_i / Σ_i h_i

h_i bounds the curvature of F_i^{q+1} / (q+1) at w where L bounds that of F_i, so a step size that was tuned for
q = 0 serves other q too. q = 0 is FedAvg, and a larger q gives more to the clients with large losses. F_i(w) is
the loss on all rows of the client.

The losses must not be negative, as a power of a negative number has no meaning here. A loss below 1e-10 counts as
1e-10, which is what the authors' code adds to it.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from ..federation import Federation, cohort_size
from ..oracle import Oracle
from ..problem import BilevelProblem
from ..schedules import Scheduled
from ..settings import Positive, about, settings
from ..steps import Draw, Sample, Samples, Scalar, Stream, X, Y, client_step, walk
from ..stepsizes import Moves, StepSize
from ..trials import Tried, apart
from .local import CLIENTS_ASKED, BatchSize, Participation, State, Steps, check_counts, count_of, regions, rows_of

Control = Literal["upper-only", "lower-only"]
LEAST = 1e-10  # a smaller loss counts as this one
SMALLEST = 1e-37  # the least h, just above the smallest normal number of float32


class Weighed(NamedTuple):
    """Δ_i, with the components of x or of y, and h_i."""

    x: Annotated[X, Moves.UPPER] | None
    y: Annotated[Y, Moves.LOWER] | None
    h: Scalar


@client_step
def weighed_steps(
    c: Oracle, control: str, q: float, eta: float, zeta: Stream, xi: Stream, lower: Draw, upper: Draw
) -> Weighed:
    """τ_i plain steps of one level, and Δ_i and h_i after them. `lower` and `upper` are all rows of the client."""
    on_x = control == "upper-only"
    w, F = (c.x, c.f(c.y, upper)) if on_x else (c.y, c.g(c.y, lower))

    def move(w: Array, b: Draw, u: Draw) -> Array:
        return w - eta * (c.f_x(c.y, u, at=w) if on_x else c.g_y(w, b))

    change = (w - walk(move, w, zeta, xi)) / eta
    F = F.clip(LEAST)
    h = q * F ** (q - 1) * (change @ change) + F**q / eta
    return Weighed(F**q * change, None, h) if on_x else Weighed(None, F**q * change, h)


@settings
class QFedAvg(Scheduled):
    """q-FedAvg on one level: a control of fair training."""

    needs_server: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    is_control: ClassVar[bool] = True  # it solves another problem, to compare with

    control: Annotated[Control, apart, about("which variables move along which loss")] = "upper-only"
    q: Annotated[
        float,
        Field(ge=0),
        Tried(0.3, 3.0),
        about("the power of the losses, less one; 0 is FedAvg, and more gives more to clients with large losses"),
    ] = 1.0
    participation: Annotated[Participation, CLIENTS_ASKED] = 0.1
    alpha: Annotated[Positive, Moves.UPPER, about("upper-only: step size η of x")] = 0.01
    beta: Annotated[Positive, Moves.LOWER, about("lower-only: step size η of y")] = 0.01
    tau: Annotated[Steps, about("local steps τ: one number, or a list with one for each client")] = 1
    batch_zeta: Annotated[BatchSize, about("rows of the lower loss for a local step")] = "full"
    batch_xi: Annotated[BatchSize, about("rows of the upper loss for a local step")] = "full"

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        cohort_size(self.participation, clients)
        check_counts("tau", self.tau, clients)

    def in_use(self, declared: list[StepSize]) -> list[StepSize]:
        """The step size of the variables that move."""
        moved = Moves.UPPER if self.control == "upper-only" else Moves.LOWER
        return [each for each in declared if each.moves is moved]

    def init(self, problem: BilevelProblem, clients: int = 1) -> State:
        """The initial parameters of the problem."""
        return State(problem.flat_x.vector, problem.flat_y.vector)

    def step(self, fed: Federation, s: State) -> State:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        x, y, h = fed.round(
            weighed_steps,
            control=self.control,
            q=self.q,
            eta=self.alpha if self.control == "upper-only" else self.beta,
            zeta=Samples("lower", rows_of(self.batch_zeta), count_of(self.tau)),
            xi=Samples("upper", rows_of(self.batch_xi), count_of(self.tau)),
            lower=Sample("lower"),
            upper=Sample("upper"),
        )
        h = jnp.maximum(h, SMALLEST)  # if all losses are so small that their powers are zero, nothing moves
        sets = regions(fed)
        return State(
            s.x if x is None else sets.x.nearest(s.x - x / h), s.y if y is None else sets.y.nearest(s.y - y / h)
        )
