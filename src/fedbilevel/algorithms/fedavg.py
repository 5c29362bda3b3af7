"""FedAvg (McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS
2017) as the controls of bilevel methods: what plain training reaches with the same rows and the same wire.

    joint         local steps on (x, y) along the gradient of f_i + g_i; up and down p + q numbers a client
    lower-only    local steps on y along ∇_y g_i, with x as it began: plain training of the lower level; q numbers
    upper-only    local steps on x along ∇_x f_i, with y as it began; p numbers
    first-order   local steps on x along ∇_x f_i and on y along ∇_y g_i: a bilevel method with v = 0, which shows
                  what the implicit part of the hypergradient buys; p + q numbers

An outer iteration is one round. None of the four has the stationary point of the bilevel problem as its fixed
point: each of them solves another problem.
"""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, NamedTuple

from jax import Array

from ..federation import Federation, cohort_size
from ..oracle import Oracle
from ..problem import BilevelProblem
from ..schedules import Scheduled
from ..settings import Positive, about, settings
from ..steps import Draw, Next, Samples, Stream, X, Y, client_step, walk
from ..stepsizes import Moves, StepSize
from ..trials import Tried, apart
from .local import CLIENTS_ASKED, BatchSize, Participation, State, Steps, check_counts, count_of, regions, rows_of

Control = Literal["joint", "lower-only", "upper-only", "first-order"]


class Trained(NamedTuple):
    x: Next[X] | None
    y: Next[Y] | None


@client_step
def plain_steps(c: Oracle, control: str, alpha: Array, beta: Array, zeta: Stream, xi: Stream) -> Trained:
    """τ_i plain steps on the variables that the control moves."""

    def move(s: tuple[Array, Array], b: Draw, u: Draw) -> tuple[Array, Array]:
        x, y = s
        if control == "joint":
            in_x, in_y = c.f_x(y, u, at=x) + c.g_x(y, b, at=x), c.f_y(y, u, at=x) + c.g_y(y, b, at=x)
            return x - alpha * in_x, y - beta * in_y
        return (
            x if control == "lower-only" else x - alpha * c.f_x(y, u, at=x),
            y if control == "upper-only" else y - beta * c.g_y(y, b, at=x),
        )

    x, y = walk(move, (c.x, c.y), zeta, xi)
    return Trained(None if control == "lower-only" else x, None if control == "upper-only" else y)


@settings
class FedAvg(Scheduled):
    """FedAvg on one level or on both: the controls of bilevel methods."""

    needs_server: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    is_control: ClassVar[bool] = True  # it solves another problem, to compare with

    control: Annotated[Control, apart, about("which variables move along which loss")] = "joint"
    participation: Annotated[Participation, CLIENTS_ASKED] = 0.1
    alpha: Annotated[Positive, Moves.UPPER, about("step size of x")] = 0.01
    beta: Annotated[Positive, Moves.LOWER, about("step size of y")] = 0.01
    tau: Annotated[Steps, Tried(5, 20), about("local steps τ: one number, or a list with one for each client")] = 1
    batch_zeta: Annotated[BatchSize, about("rows of the lower loss for a local step")] = "full"
    batch_xi: Annotated[BatchSize, about("rows of the upper loss for a local step")] = "full"

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        cohort_size(self.participation, clients)
        check_counts("tau", self.tau, clients)

    def in_use(self, declared: list[StepSize]) -> list[StepSize]:
        """The step sizes of the variables that the control moves."""
        still = {"lower-only": Moves.UPPER, "upper-only": Moves.LOWER}.get(self.control)
        return [each for each in declared if each.moves is not still]

    def init(self, problem: BilevelProblem, clients: int = 1) -> State:
        """The initial parameters of the problem."""
        return State(problem.flat_x.vector, problem.flat_y.vector)

    def step(self, fed: Federation, s: State) -> State:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y)
        x, y = fed.round(
            plain_steps,
            control=self.control,
            alpha=self.alpha,
            beta=self.beta,
            zeta=Samples("lower", rows_of(self.batch_zeta), count_of(self.tau)),
            xi=Samples("upper", rows_of(self.batch_xi), count_of(self.tau)),
        )
        sets = regions(fed)
        return State(s.x if x is None else sets.x.nearest(x), s.y if y is None else sets.y.nearest(y))
