"""The parts that methods with a server share: local work at both levels, and the hypergradient.

FedNest uses One-Round-Lower and One-Round-Upper of the AggITD paper too. Each piece of work is a small class with
its settings and the rounds that use them. A method combines the pieces that it uses, so it has no setting that it
would ignore.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, TypeVar

import jax.numpy as jnp
from jax import Array
from pydantic import Field

from ..errors import FedBilevelWarning, SettingsError
from ..feasible import Regions, regions_of
from ..federation import Federation, cohort_size
from ..oracle import Oracle, OwnOracle
from ..own import own_part
from ..problem import BilevelProblem
from ..schedules import Scheduled
from ..settings import Count, Positive, about, settings
from ..steps import Draw, Epochs, Next, Own, PerClient, Sample, Samples, Stream, W, X, Y, client_step, sgd, svrg
from ..stepsizes import Automatic, Momentum, Moves, StepSize, automatic
from ..trials import Rows, Tried
from .optimiser import Memory, advance, chosen, first_memory
from .secants import length_for, no_pairs
from .skipping import check_skipping, skip_loop

BatchSize = Annotated[Count | Literal["full"], Rows()]
Steps = Count | Annotated[tuple[Count, ...], Field(min_length=1)]
Participation = Count | Annotated[float, Field(gt=0, le=1)]
CLIENTS_ASKED = about("clients per outer iteration: a whole number, or a share such as 0.1; 1.0 means all clients")


class State(NamedTuple):
    """The start of an outer iteration; y is the warm start of the lower problem."""

    x: Array
    y: Array


class ServerState(NamedTuple):
    """The start of an outer iteration of a method whose server remembers more. What is not used is None.

    upper    the state of the server's optimiser
    before   the y before the last lower round, for momentum
    p        the last solution of the Hessian system, as a warm start
    pairs    directions of y and their Hessian products, for quasi-Newton steps (`secants.py`)
    """

    x: Array
    y: Array
    upper: Memory = None
    before: Array | None = None
    p: Array | None = None
    pairs: Array | None = None


S = TypeVar("S", State, ServerState)


class Hypergradient(NamedTuple):
    h: X


class OwnHypergradient(NamedTuple):
    h: X
    w: Own[W]


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
def own_hypergradient(c: OwnOracle, p: Array, own_step: Array, xi: Draw, chi: Draw) -> OwnHypergradient:
    """h_i as above, and for the client itself  w_i ← w_i - s (∇_w F_i(x, y; ξ_i) - ∇_w∇_y G_i(x, y; χ_i) p)"""
    w = c.w - own_step * (c.f_w(c.y, xi) - c.g_wy(c.y, p, chi))
    return OwnHypergradient(c.f_x(c.y, xi) - c.g_xy(c.y, p, chi), w)


@client_step
def upper_steps(c: Oracle, h: Array, alpha: Array, shared: bool, xi: Stream) -> Upper:
    """One-Round-Upper: x_i ← x_i - α_i (h - ∇_x F_i(x, y; ξ) + ∇_x F_i(x_i, y; ξ)), τ_i times from x."""
    step = alpha / xi.steps if shared else alpha
    return Upper(svrg(lambda x, b: c.f_x(c.y, b, at=x), c.x, h, step, xi))


@settings
class LocalWork(Scheduled):
    """Which clients take part in an outer iteration, and whether local steps share the step size.

    projects    whether x and y stay in the feasible sets of the problem
    restricts   whether the hypergradient takes the set of y into account
    carries     whether Hessian products travel with the lower rounds, unless conjugate gradients are used
    """

    needs_server: ClassVar[bool] = True
    projects: ClassVar[bool] = True
    restricts: ClassVar[bool] = False
    carries: ClassVar[bool] = False

    participation: Annotated[Participation, CLIENTS_ASKED] = 0.1
    share_steps: Annotated[
        bool, about("divide the step sizes among the local steps: α/τ_i and β/τ_i, as in the theory")
    ] = False

    def check(self, clients: int) -> None:
        """Raise `SettingsError` if a setting does not fit the number of registered clients."""
        asked = cohort_size(self.participation, clients)
        if getattr(self, "lower_solver", None) == "skip":
            check_skipping(self, everyone=asked == clients)
        for name in ("lower_steps", "upper_steps", "tau"):
            check_counts(name, getattr(self, name, None), clients)

    def in_use(self, declared: list[StepSize]) -> list[StepSize]:
        """The step sizes without λ if conjugate gradients are used, and with the optimiser's if it replaces α."""
        upper, steps = getattr(self, "upper", None), getattr(self, "upper_steps", 1)
        idle = {"lam"} if getattr(self, "estimator", None) == "cg" else set[str]()
        idle |= {"alpha"} if upper is not None and once(steps) else set()
        idle |= set(getattr(self, "idle", ()))
        used = [each for each in declared if each.setting not in idle]
        if isinstance(getattr(upper, "learning_rate", None), float):
            used.insert(0, StepSize("upper.learning_rate", Moves.UPPER))
        return used

    def limit(self, moves: Moves, clients: int) -> float | None:
        """The usual limit. If local steps share the step size, it is multiplied by the fewest that are known."""
        if not self.share_steps or moves is not Moves.LOWER:
            return moves.value
        steps: Any = getattr(self, "lower_steps", None) or getattr(self, "lower_epochs", 1)
        return float(Moves.LOWER.value * (min(steps) if isinstance(steps, tuple) else steps))

    def init(self, problem: BilevelProblem, clients: int = 1) -> Any:
        """The initial parameters of the problem, however many clients there are: a `State`, or a `ServerState`."""
        warn_of_sets(problem, self.restricts)
        x, y, upper = problem.flat_x.vector, problem.flat_y.vector, getattr(self, "upper", None)
        momentum, solves = bool(getattr(self, "momentum_y", 0)), getattr(self, "estimator", None) == "cg"
        if upper is None and not momentum and not solves:
            return State(x, y)
        memory = None if upper is None else first_memory(upper, problem)
        kept = getattr(self, "memory", 0) if solves else 0
        length = length_for(problem.size_y) if isinstance(kept, Automatic) else kept
        pairs = jnp.asarray(no_pairs(length, problem.size_y)) if length else None
        return ServerState(x, y, memory, y if momentum else None, jnp.zeros_like(y) if solves else None, pairs)


@settings
class LowerWork(LocalWork):
    """One-Round-Lower: local steps on the lower loss, and the gradient q that corrects them."""

    beta: Annotated[Positive, Moves.LOWER, automatic, about("lower step size β")] = 0.003
    lower_solver: Annotated[
        Literal["svrg", "sgd", "skip"],
        about(
            "lower local steps: svrg with the correction q, which is a round; sgd without; skip with a correction "
            "that clients keep, and rounds at random times"
        ),
    ] = "svrg"
    chance: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None,
        about("skip: the probability of a round after a local step; default: one over lower_steps"),
    ] = None
    lower_epochs: Annotated[
        Count, about("lower local work, in passes over the client's rows; not used if lower_steps is set")
    ] = 5
    lower_steps: Annotated[
        Steps | None,
        Tried(5),
        about("lower local steps τ: one number, or a list with one for each client; default: lower_epochs"),
    ] = None
    batch_zeta: Annotated[BatchSize, about("rows for the gradient q of the lower loss")] = "full"
    batch_zeta_local: Annotated[BatchSize, about("rows for a lower local step")] = 10
    momentum_y: Annotated[
        Annotated[float, Field(ge=0, lt=1)],
        Momentum(),
        automatic,
        about("heavy-ball momentum of y over the lower rounds, at the server"),
    ] = 0.0

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
            work = Samples("lower", rows, count_of(self.lower_steps))
        return dict(beta=self.beta, shared=self.share_steps, zeta=work)

    def lower_loop(self, fed: Federation, s: S, N: int) -> S:
        """N times One-Round-Lower from s. With "skip" it is as many local steps, and rounds at random times."""
        if self.lower_solver == "skip":
            if regions(fed).y.project is not None:
                raise SettingsError(
                    "algorithm.lower_solver = 'skip' is wrong with feasible_y: it knows no such set; use 'svrg'"
                )
            assert isinstance(self.lower_steps, int)  # as `check` asks for
            steps, chance = self.lower_steps, 1 / self.lower_steps if self.chance is None else self.chance
            y = skip_loop(fed, s.y, N * steps, chance, self.beta, rows_of(self.batch_zeta_local))
            return s._replace(y=y)
        for _ in range(N):
            s = self.arrived(s, self.descend(fed, s.y, before(s)))
        return s

    def descend(self, fed: Federation, y: Array, before: Array | None = None) -> Array:
        """One-Round-Lower with the gradient it needs: two rounds, or one with the SGD solver."""
        fed.hold(y=y)
        if self.lower_solver == "sgd":
            return self.landed(fed, fed.round(lower_sgd, **self.lower_work).y, y, before)
        q = fed.round(lower_gradient, zeta=self.zeta).q
        fed.note(lower_residual=q)
        return self.landed(fed, fed.round(lower_steps, q=q, **self.lower_work).y, y, before)

    def landed(self, fed: Federation, mean: Array, y: Array, before: Array | None) -> Array:
        """y^{t+1} from the mean of the clients' y_i: that mean + momentum (y^t - y^{t-1}), in the feasible set."""
        if before is not None:
            mean = mean + self.momentum_y * (y - before)
        return regions(fed).y.nearest(mean)

    def arrived(self, s: S, y: Array) -> S:
        """The state after a lower round that led to y."""
        if isinstance(s, ServerState) and s.before is not None:
            return s._replace(y=y, before=s.y)
        return s._replace(y=y)


@settings
class UpperWork(LocalWork):
    """One-Round-Upper: local steps on the upper loss."""

    alpha: Annotated[Positive, Moves.UPPER, automatic, about("upper step size α")] = 0.01
    upper_steps: Annotated[Steps, about("upper local steps τ: one number, or a list with one for each client")] = 1
    batch_xi_local: Annotated[BatchSize, about("rows for an upper local step")] = "full"
    upper: Annotated[
        Any,
        about(
            "the server's optimiser of x, any of Optax, such as { name = 'adam', learning_rate = 0.01 }; with one "
            "upper step it replaces alpha; default: none, as in the paper"
        ),
    ] = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "upper", chosen(self.upper))

    @property
    def upper_work(self) -> dict[str, Any]:
        """The arguments of a round of upper local steps."""
        work = Samples("upper", rows_of(self.batch_xi_local), count_of(self.upper_steps))
        return dict(alpha=self.alpha, shared=self.share_steps, xi=work)

    def after_upper(self, fed: Federation, s: S, mean: Array) -> S:
        """The next x from the mean of the clients' x_i, in the feasible set.

        An optimiser is given the pseudo-gradient (x - mean_i x_i) / α.
        """
        if self.upper is not None:
            return self.optimise(fed, s, (s.x - mean) / self.alpha)
        return s._replace(x=regions(fed).x.nearest(mean))

    def optimise(self, fed: Federation, s: S, g: Array) -> S:
        """The next x by the optimiser's step along g, in the feasible set."""
        assert isinstance(s, ServerState)  # as `init` makes it for a method with an optimiser
        x, memory = advance(self.upper, fed.engine.problem, g, s.upper, s.x)
        return s._replace(x=regions(fed).x.nearest(x), upper=memory)


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

    restricts: ClassVar[bool] = True

    batch_xi: Annotated[BatchSize, about("rows for the gradients of the upper loss")] = "full"
    same_samples: Annotated[
        bool, about("upper local steps use the rows of the hypergradient instead of rows of their own")
    ] = False

    @property
    def xi(self) -> Sample:
        """The rows of a gradient of the upper loss."""
        return Sample("upper", rows_of(self.batch_xi))

    def follow(self, fed: Federation, s: S, h: Array, drawn: int) -> S:
        """One-Round-Upper along h, whose gradients of the upper loss were taken in the round `drawn`.

        With an optimiser and a single step it is no round: the optimiser is given h itself.
        """
        fed.note(hypergradient_estimate=h)
        if self.upper is not None and once(self.upper_steps):
            return self.optimise(fed, s, h)
        work = self.upper_work
        if self.same_samples:
            work["xi"] = replace(work["xi"], size=self.xi.size, of=drawn)
        return self.after_upper(fed, s, fed.round(upper_steps, h=h, **work).x)


@settings
class ImplicitHypergradient(AveragedHypergradient):
    """The hypergradient for an estimate p ≈ (∇²_y g)^{-1} ∇_y f, which a single round computes at the clients.

    A client that has variables w_i of its own (`Problem.own`) moves them in this round. With F = 1/m Σ_i f_i,

        m ∂F/∂w_i = ∇_w f_i - ∇_w∇_y g_i (∇²_y g)^{-1} ∇_y f,

    which needs nothing but the p that the client is sent anyway: no round and no byte is added.
    """

    own_step: Annotated[
        Positive | None, Moves.UPPER, about("step size for the own variables of clients; default: alpha")
    ] = None

    def improve(self, fed: Federation, s: S, p: Array) -> S:
        """The hypergradient for p, and One-Round-Upper along it: two rounds, at the held x and y of s.

        If all upper variables are the clients' own, x is empty and the second round is left out.
        """
        drawn, rows = fed.ledger.rounds, dict(xi=self.xi, chi=self.chi)
        if own_part(fed.engine.problem) is None:
            h = fed.round(hypergradient, p=p, **rows).h
        else:
            own_step = self.alpha if self.own_step is None else self.own_step
            h = fed.round(own_hypergradient, p=p, own_step=own_step, **rows).h
        return self.follow(fed, s, h, drawn) if h.size else s


def warn_of_sets(problem: BilevelProblem, restricts: bool) -> None:
    """Warn if the hypergradient of a method does not take the feasible set of y into account."""
    region = regions_of(problem).y
    if region.project is not None and (region.tangent is None or not restricts):
        text = (
            "the hypergradient ignores feasible_y, so it is right only while y* is in the interior; "
            "a Box or a Simplex is taken into account by fbo-aggitd, fednest, naive-itd and single-loop methods"
        )
        warnings.warn(text, FedBilevelWarning, stacklevel=3)


def once(steps: int | tuple[int, ...]) -> bool:
    """Whether every client makes one step. One-Round-Upper then gives x - α h."""
    return steps == 1 or (isinstance(steps, tuple) and set(steps) == {1})


def before(s: Any) -> Array | None:
    """The y before the last lower round, if the state has it."""
    return s.before if isinstance(s, ServerState) else None


def regions(fed: Federation) -> Regions:
    """The feasible sets of the problem that a federation works on."""
    return regions_of(fed.engine.problem)


def rows_of(size: int | str) -> int | None:
    """The size of a sample. "full" becomes None, which means all rows."""
    return None if isinstance(size, str) else size


def check_counts(name: str, steps: int | tuple[int, ...] | None, clients: int) -> None:
    """Raise `SettingsError` if a list of steps does not have one number for each registered client."""
    if isinstance(steps, tuple) and len(steps) != clients:
        raise SettingsError(
            f"{name} has {len(steps)} numbers for {clients} clients; give one number, or one for each"
        )


def count_of(steps: int | tuple[int, ...]) -> int | PerClient:
    return PerClient(steps) if isinstance(steps, tuple) else steps
