"""The sections of a spec that set how a run proceeds: its federation, its evaluation and its end."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import Field, FiniteFloat

from .._collection import Weighting
from ..aggregate import AGGREGATORS, Gather, Rule, WeightedMean, gather_by, quorum
from ..data import Clients
from ..engines import ENGINES, MAX_ROWS, AutoSettings, Engine, LoopSettings, SimulationSettings
from ..errors import SettingsError, shown
from ..federation import Cohorts, needed
from ..names import Names, users_code
from ..policies import Policies
from ..privacy import NoisySum, Privacy, Secret
from ..problem import BilevelProblem
from ..record import WINDOW, Mode, better, direction
from ..settings import Count, Positive, about, choose, settings


@settings
class FederationSettings:
    """How clients are run, and how their replies are aggregated."""

    choices: ClassVar[Mapping[str, Names[type[Any]]]] = {"engine": ENGINES, "aggregator": AGGREGATORS}

    engine: Annotated[Any, about("what runs the clients")] = dataclasses.field(default_factory=SimulationSettings)
    aggregator: Annotated[Any, about("how the replies of a round are aggregated, each field separately")] = (
        dataclasses.field(default_factory=WeightedMean)
    )
    cohort: Annotated[
        Cohorts,
        about("how long a cohort works: an outer iteration, a phase (its lower or upper part), or a round"),
    ] = "iteration"
    cohort_by: Annotated[
        Literal["rounds", "iterations"],
        about("cohorts depend on the rounds or on the outer iterations so far; then all methods have the same"),
    ] = "rounds"
    weighting: Annotated[Weighting, about("mean over clients: uniform, or by their number of samples")] = "uniform"
    max_rows: Annotated[
        Count, about("rows of a part that a site of a real federation may claim; one that claims more is refused")
    ] = MAX_ROWS
    min_replies: Annotated[
        Count | Annotated[float, Field(gt=0, le=1)] | None,
        about("a round with fewer valid replies ends the run: a number, or a share; default: what the rule needs"),
    ] = None
    deadline: Annotated[
        Positive | None, about("seconds after which a reply is not used; default: all are waited for")
    ] = None
    retries: Annotated[
        Annotated[int, Field(ge=0, lt=2**31)],
        about("how often clients without a valid reply are asked again in a round"),
    ] = 0
    oversample: Annotated[
        Annotated[float, Field(ge=0)],
        about("how many more clients are asked, as a share of the cohort; the first valid replies are used"),
    ] = 0.0
    strikes: Annotated[
        Count | Literal["never"], about("bad replies in a row after which a client is excluded for a while")
    ] = 3
    exclusion_rounds: Annotated[Count, about("rounds for which such a client is excluded")] = 50

    def __post_init__(self) -> None:
        for name, table in self.choices.items():
            object.__setattr__(self, name, choose(table, getattr(self, name), f"federation.{name}"))

    def build(self, problem: BilevelProblem, clients: Clients, *, exactly: bool = False) -> Engine:
        """Build the chosen engine for these clients.

        The default engine traces steps by JAX. For a problem that cannot be traced it stands for the loop, unless
        it was chosen `exactly`.
        """
        chosen = LoopSettings() if self.must_loop(problem) and not exactly else self.engine
        try:
            with users_code("build raises "):
                engine: Engine = chosen.build(problem, clients)
        except SettingsError as error:
            told = str(error)
            raise SettingsError(told if told.startswith("federation.") else f"federation.engine.{told}") from None
        return engine

    def must_loop(self, problem: BilevelProblem) -> bool:
        """Whether the engine is the default or left open, and only the loop can run the problem."""
        return not problem.traceable and self.engine in (SimulationSettings(), AutoSettings())

    def policies(self, privacy: Privacy) -> Policies:
        """The policies of the federation: what it tolerates."""
        shared = {f.name: getattr(self, f.name) for f in dataclasses.fields(Policies)}
        made = Policies(**shared | {"strikes": None if self.strikes == "never" else self.strikes})
        return made if privacy.mode is None else made.under_privacy()

    @property
    def rule(self) -> Rule | None:
        """The aggregator, or None if it is the mean."""
        return None if isinstance(self.aggregator, WeightedMean) else self.aggregator

    def needed(self, asked: int) -> int:
        """How many valid replies a round needs that asks this many clients."""
        return max(needed(self.min_replies, asked), quorum(self.rule))

    def gather(self, privacy: Privacy, secret: Secret | None) -> Gather:
        """Return the maker of each round's accumulator. The noise of privacy is drawn from the secret."""
        if privacy.mode == "central":
            own = secret or Secret()
            return lambda call: NoisySum(privacy, own, call)
        return gather_by(self.rule)


@settings
class EvaluateSettings:
    """When a run is measured and saved."""

    every: Annotated[Count, about("outer iterations between two evaluations")] = 1
    clients: Annotated[Count, about("clients on whose data upper_loss and lower_loss are probed")] = 10
    checkpoint_every: Annotated[Count, about("outer iterations between two checkpoints")] = 10
    window: Annotated[
        Count, about("communication rounds at the end of a run over which its accuracy is averaged")
    ] = WINDOW
    metric: Annotated[
        str | None,
        about("the metric that the curve shows and `tune` compares; default: test_accuracy, if it is measured"),
    ] = None
    train: Annotated[
        bool, about("also measure train_accuracy and train_loss, at the server, on all training rows")
    ] = False

    def check(self, privacy: Privacy) -> None:
        """Raise if a measurement would release what privacy protects."""
        if self.train and privacy.mode is not None:
            raise SettingsError(
                f"evaluate.train = true is wrong with privacy.mode = {privacy.mode!r}: it would release the "
                "accuracy on the clients' rows without noise; remove one of the two"
            )


@settings
class StopSettings:
    """When a run ends: at the first limit reached. An iteration that would exceed a limit is not begun."""

    rounds: Annotated[Count | None, about("communication rounds")] = None
    iterations: Annotated[Count | None, about("outer iterations")] = None
    seconds: Annotated[Positive | None, about("seconds of training, without the time for evaluation")] = None
    accuracy: Annotated[Annotated[float, Field(gt=0, le=1)] | None, about("test accuracy, between 0 and 1")] = None
    metric: Annotated[str | None, about("any metric of the history, for stop.at and stop.patience")] = None
    at: Annotated[FiniteFloat | None, about("the value of stop.metric at which a run ends")] = None
    patience: Annotated[
        Count | None, about("a run ends after this many evaluations without a better value of stop.metric")
    ] = None
    mode: Annotated[
        Mode | None,
        about("max: larger values of stop.metric are better; min: smaller; default: min for losses and errors"),
    ] = None

    def check(self) -> None:
        """Raise if there is no limit at all, or if a part of one is missing."""
        if all(value is None for value in dataclasses.astuple(self)):
            raise SettingsError(
                "stop has no limit; set stop.rounds, stop.iterations, stop.seconds, stop.accuracy or stop.metric"
            )
        for name in ("at", "patience", "mode"):
            if self.metric is None and getattr(self, name) is not None:
                raise SettingsError(
                    f"stop.{name} = {getattr(self, name)!r} is wrong: stop.metric is missing; name the metric"
                )
        if self.metric is not None and self.at is None and self.patience is None:
            raise SettingsError(
                f"stop.metric = {shown(self.metric)} is wrong: it has no limit; set stop.at or stop.patience"
            )

    @property
    def direction(self) -> Mode:
        """Whether larger or smaller values of `metric` are better."""
        return self.mode or direction(self.metric or "")

    @property
    def goals(self) -> tuple[Goal, ...]:
        """The values of metrics at which a run ends; the accuracy is one of them."""
        accuracy = None if self.accuracy is None else Goal("test_accuracy", self.accuracy, "max")
        own = None if self.metric is None or self.at is None else Goal(self.metric, self.at, self.direction)
        return tuple(goal for goal in (accuracy, own) if goal is not None)


class Goal(NamedTuple):
    """A value of a metric at which a run ends."""

    metric: str
    at: float
    mode: Mode

    def reached(self, record: Mapping[str, Any]) -> bool:
        """Whether an evaluation has reached it. One that lacks the metric, or has no finite value, has not."""
        value = record.get(self.metric)
        return value is not None and not better(self.at, value, self.mode)
