"""Fed-F2SA: a first-order method (F2SA: Kwon, Kwon, Wright and Nowak, "A Fully First-Order Method for Stochastic
Bilevel Optimization", ICML 2023) in a federation.

Two lower problems are followed, whose losses differ by a multiple ν of the upper loss:

    one-sided   y₊ ≈ argmin g + ν f,  y ≈ argmin g         ∇f ≈ ∇_x f(y₊) + (∇_x g(y₊) - ∇_x g(y)) / ν
    symmetric   y± ≈ argmin g ± ν f,  y = (y₊ + y₋) / 2     ∇f ≈ mean of ∇_x f(y±) + (∇_x g(y₊) - ∇_x g(y₋)) / (2ν)

The bias is O(ν) for the first and O(ν²) for the second. It does not shrink with the step sizes, so it is a floor.
There is no Hessian product and no mixed derivative. ν is one over the penalty λ of the paper. An outer iteration
is one round, in which all three move from the old point. Both lower problems have the same step size β: with
another one the lag of y₊ behind y would be divided by ν and taken for a gradient. A client receives and sends
p + 2q numbers.

`schedule = "paper"` has the exponents of benchopt's solver F2SA: 4/7 for x and for y, and 5/7 for the y₊ of the
loss f + g/ν, whose step size is β ν here, so that ν falls with 1/7.

In float32 the difference of two gradients that agree up to ν loses digits: below about ν = 1e-4 rounding is larger
than the bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal, NamedTuple

from jax import Array

from ..federation import Federation, cohort_size
from ..oracle import Oracle
from ..problem import BilevelProblem
from ..schedules import Scheduled
from ..settings import Positive, about, settings
from ..steps import Draw, Sample, X, Y, client_step
from ..stepsizes import Moves, automatic
from ..trials import Tried
from .local import CLIENTS_ASKED, BatchSize, Participation, regions, rows_of


class Penalised(NamedTuple):
    x: X
    plus: Y
    minus: Y


class PenaltyState(NamedTuple):
    """The start of an outer iteration. `minus` is None with the one-sided difference, where y takes its place."""

    x: Array
    y: Array
    plus: Array
    minus: Array | None = None


@client_step
def penalised_directions(
    c: Oracle, plus: Array, minus: Array | None, nu: Array, zeta: Draw, xi: Draw
) -> Penalised:
    """The directions of x and of both lower problems; each difference is taken on the same rows."""
    low = c.y if minus is None else minus
    up = c.g_y(plus, zeta) + nu * c.f_y(plus, xi)
    apart = (c.g_x(plus, zeta) - c.g_x(low, zeta)) / nu
    if minus is None:
        return Penalised(c.f_x(plus, xi) + apart, up, c.g_y(low, zeta))
    return Penalised((c.f_x(plus, xi) + c.f_x(low, xi) + apart) / 2, up, c.g_y(low, zeta) - nu * c.f_y(low, xi))


@settings
class FedF2SA(Scheduled):
    """Fed-F2SA: the hypergradient from gradients of two lower problems, without second derivatives."""

    needs_server: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    decay: ClassVar[Mapping[str, float]] = {"alpha": 4 / 7, "beta": 4 / 7, "nu": 1 / 7}

    participation: Annotated[Participation, CLIENTS_ASKED] = 0.1
    alpha: Annotated[Positive, Moves.UPPER, automatic, about("upper step size α")] = 0.01
    beta: Annotated[Positive, Moves.LOWER, automatic, about("step size β of both lower problems")] = 0.1
    nu: Annotated[Positive, about("the share ν of the upper loss in a lower problem, one over the penalty")] = 0.01
    difference: Annotated[
        Literal["one-sided", "symmetric"],
        Tried("one-sided", "symmetric"),
        about("the bias is O(ν) one-sided and O(ν²) symmetric"),
    ] = "one-sided"
    batch_zeta: Annotated[BatchSize, about("rows for the derivatives of the lower loss")] = "full"
    batch_xi: Annotated[BatchSize, about("rows for the derivatives of the upper loss")] = "full"

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        cohort_size(self.participation, clients)

    def init(self, problem: BilevelProblem, clients: int = 1) -> PenaltyState:
        """The initial parameters. The lower variables begin together, as a gap would be taken for a gradient."""
        x, y = problem.flat_x.vector, problem.flat_y.vector
        return PenaltyState(x, y, y, y if self.difference == "symmetric" else None)

    def step(self, fed: Federation, s: PenaltyState) -> PenaltyState:
        """One outer iteration: one round."""
        fed = fed.cohort(self.participation)
        fed.hold(x=s.x, y=s.y) if s.minus is None else fed.hold(x=s.x)
        rows = dict(zeta=Sample("lower", rows_of(self.batch_zeta)), xi=Sample("upper", rows_of(self.batch_xi)))
        d = fed.round(penalised_directions, plus=s.plus, minus=s.minus, nu=self.nu, **rows)
        fed.note(hypergradient_estimate=d.x, lower_residual=d.minus)
        sets = regions(fed)
        x, plus = sets.x.nearest(s.x - self.alpha * d.x), sets.y.nearest(s.plus - self.beta * d.plus)
        low = sets.y.nearest((s.y if s.minus is None else s.minus) - self.beta * d.minus)
        if s.minus is None:
            return PenaltyState(x, low, plus)
        return PenaltyState(x, (plus + low) / 2, plus, low)
