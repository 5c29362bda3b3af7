"""The parts that methods with a server share: local work at both levels, and the hypergradient.

FedNest uses One-Round-Lower and One-Round-Upper of the AggITD paper too. Each piece of work is a small class with
its settings and the rounds that use them. A method combines the pieces that it uses, so it has no setting that it
would ignore.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from jax import Array
from pydantic import Field

from ..errors import SettingsError
from ..federation import Federation, cohort_size
from ..oracle import Oracle
from ..problem import BilevelProblem
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Epochs, Next, PerClient, Sample, Samples, Stream, X, Y, client_step, sgd, svrg
from ..stepsizes import Moves, automatic

BatchSize = Count | Literal["full"]
Steps = Count | Annotated[tuple[Count, ...], Field(min_length=1)]


class State(NamedTuple):
    """The start of an outer iteration; y is the warm start of the lower problem."""

    x: Array
    y: Array


class Hypergradient(NamedTuple):
    h: X


class Upper(NamedTuple):
    x: Next[X]


class Lower(NamedTuple):
    y: Next[Y]


class LowerGradient(NamedTuple):
    q: Y


@client_step
def lower_gradient(c: Oracle, zeta: Draw) -> LowerGradient:
    """q_i = ∇_y G_i(x, y; ζ_i)"""
    return LowerGradient(c.g_y(c.y, zeta))


@client_step
def lower_steps(c: Oracle, q: Array, beta: Array, shared: bool, zeta: Stream) -> Lower:
    """One-Round-Lower: y_i ← y_i - β_i (∇_y G_i(x, y_i; ζ) - ∇_y G_i(x, y; ζ) + q), τ_i times from y.

    `shared` divides the step size among the steps: β_i = β / τ_i.
    """
    return Lower(svrg(c.g_y, c.y, q, beta / zeta.steps if shared else beta, zeta))


@client_step
def lower_sgd(c: Oracle, beta: Array, shared: bool, zeta: Stream) -> Lower:
    """y_i ← y_i - β_i ∇_y G_i(x, y_i; ζ), τ_i times from y."""
    return Lower(sgd(c.g_y, c.y, beta / zeta.steps if shared else beta, zeta))


@client_step
def hypergradient(c: Oracle, p: Array, xi: Draw, chi: Draw) -> Hypergradient:
    """h_i = ∇_x F_i(x, y; ξ_i) - ∇_x∇_y G_i(x, y; χ_i) p"""
    return Hypergradient(c.f_x(c.y, xi) - c.g_xy(c.y, p, chi))


@client_step
def upper_steps(c: Oracle, h: Array, alpha: Array, shared: bool, xi: Stream) -> Upper:
    """One-Round-Upper: x_i ← x_i - α_i (h - ∇_x F_i(x, y; ξ) + ∇_x F_i(x_i, y; ξ)), τ_i times from x."""
    step = alpha / xi.steps if shared else alpha
    return Upper(svrg(lambda x, b: c.f_x(c.y, b, at=x), c.x, h, step, xi))


@settings
class LocalWork:
    """Which clients take part in an outer iteration, and whether local steps share the step size."""

    needs_server: ClassVar[bool] = True

    participation: Annotated[
        Count | Annotated[float, Field(gt=0, le=1)],
        about("clients per outer iteration: a whole number, or a share such as 0.1; 1.0 means all clients"),
    ] = 0.1
    share_steps: Annotated[
        bool, about("divide the step sizes among the local steps: α/τ_i and β/τ_i, as in the theory")
    ] = False

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        cohort_size(self.participation, clients)
        for name in ("lower_steps", "upper_steps"):
            steps = getattr(self, name, None)
            if isinstance(steps, tuple) and len(steps) != clients:
                raise SettingsError(
                    f"{name} has {len(steps)} numbers for {clients} clients; give one number, or one for each"
                )

    def limit(self, moves: Moves, clients: int) -> float | None:
        """The usual limit. If local steps share the step size, it is multiplied by the fewest that are known."""
        if not self.share_steps or moves is not Moves.LOWER:
            return moves.value
        steps: Any = getattr(self, "lower_steps", None) or getattr(self, "lower_epochs", 1)
        return float(Moves.LOWER.value * (min(steps) if isinstance(steps, tuple) else steps))

    def init(self, problem: BilevelProblem, clients: int = 1) -> State:
        """The initial parameters of the problem, however many clients there are."""
        return State(problem.flat_x.vector, problem.flat_y.vector)


@settings
class LowerWork(LocalWork):
    """One-Round-Lower: local steps on the lower loss, and the gradient q that corrects them."""

    beta: Annotated[Positive, Moves.LOWER, automatic, about("lower step size β")] = 0.003
    lower_solver: Annotated[
        Literal["svrg", "sgd"], about("lower local steps with or without the SVRG correction q")
    ] = "svrg"
    lower_epochs: Annotated[
        Count, about("lower local work, in passes over the client's rows; not used if lower_steps is set")
    ] = 5
    lower_steps: Annotated[
        Steps | None,
        about("lower local steps τ: one number, or a list with one for each client; default: lower_epochs"),
    ] = None
    batch_zeta: Annotated[BatchSize, about("rows for the gradient q of the lower loss")] = "full"
    batch_zeta_local: Annotated[BatchSize, about("rows for a lower local step")] = 10

    @property
    def zeta(self) -> Sample:
        """The rows of the gradient q."""
        return Sample("lower", rows_of(self.batch_zeta))

    @property
    def lower_work(self) -> dict[str, Any]:
        """The arguments of a round of lower local steps."""
        rows = rows_of(self.batch_zeta_local)
        if self.lower_steps is None:
            work: Epochs | Samples = Epochs("lower", rows, self.lower_epochs)
        else:
            work = Samples("lower", rows, _count(self.lower_steps))
        return dict(beta=self.beta, shared=self.share_steps, zeta=work)

    def descend(self, fed: Federation, y: Array) -> Array:
        """One-Round-Lower with the gradient it needs: two rounds, or one with the SGD solver."""
        fed.hold(y=y)
        if self.lower_solver == "sgd":
            return fed.round(lower_sgd, **self.lower_work).y
        q = fed.round(lower_gradient, zeta=self.zeta).q
        fed.note(lower_residual=q)
        return fed.round(lower_steps, q=q, **self.lower_work).y


@settings
class UpperWork(LocalWork):
    """One-Round-Upper: local steps on the upper loss."""

    alpha: Annotated[Positive, Moves.UPPER, automatic, about("upper step size α")] = 0.01
    upper_steps: Annotated[Steps, about("upper local steps τ: one number, or a list with one for each client")] = 1
    batch_xi_local: Annotated[BatchSize, about("rows for an upper local step")] = "full"

    @property
    def upper_work(self) -> dict[str, Any]:
        """The arguments of a round of upper local steps."""
        work = Samples("upper", rows_of(self.batch_xi_local), _count(self.upper_steps))
        return dict(alpha=self.alpha, shared=self.share_steps, xi=work)


@settings
class SecondDerivatives:
    """The rows of Hessian products and of mixed derivatives."""

    batch_u: Annotated[BatchSize, about("rows for a Hessian product")] = "full"
    batch_chi: Annotated[BatchSize, about("rows for the mixed derivative")] = "full"

    @property
    def u(self) -> Sample:
        """The rows of a Hessian product."""
        return Sample("lower", rows_of(self.batch_u))

    @property
    def chi(self) -> Sample:
        """The rows of a mixed derivative."""
        return Sample("lower", rows_of(self.batch_chi))


@settings
class AveragedHypergradient(UpperWork, SecondDerivatives):
    """A hypergradient that is averaged over clients, and One-Round-Upper along it."""

    batch_xi: Annotated[BatchSize, about("rows for the gradients of the upper loss")] = "full"
    same_samples: Annotated[
        bool, about("upper local steps use the rows of the hypergradient instead of rows of their own")
    ] = False

    @property
    def xi(self) -> Sample:
        """The rows of a gradient of the upper loss."""
        return Sample("upper", rows_of(self.batch_xi))

    def improve(self, fed: Federation, p: Array) -> Array:
        """The hypergradient for p, and One-Round-Upper along it: two rounds, at the held x and y."""
        drawn = fed.ledger.rounds
        h = fed.round(hypergradient, p=p, xi=self.xi, chi=self.chi).h
        return self.follow(fed, h, drawn)

    def follow(self, fed: Federation, h: Array, drawn: int) -> Array:
        """One-Round-Upper along h, whose gradients of the upper loss were taken in the round `drawn`."""
        fed.note(hypergradient_estimate=h)
        work = self.upper_work
        if self.same_samples:
            work["xi"] = replace(work["xi"], size=self.xi.size, of=drawn)
        return fed.round(upper_steps, h=h, **work).x


def rows_of(size: int | str) -> int | None:
    """The size of a sample. "full" becomes None, which means all rows."""
    return None if isinstance(size, str) else size


def _count(steps: int | tuple[int, ...]) -> int | PerClient:
    return PerClient(steps) if isinstance(steps, tuple) else steps
