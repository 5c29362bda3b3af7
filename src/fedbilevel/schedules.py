"""Step sizes that become smaller from one outer iteration to the next.

A method that is `Scheduled` has the setting `schedule`, a table with a name:

    constant   step sizes stay as they are (the default)
    power      a_t = (1 + t/offset)^(-exponent) in the outer iteration t = 0, 1, ...; 1/sqrt(t) is exponent = 0.5
    paper      the decay of the method's own paper, as (1 + t/offset)^(-e) with an exponent e for each setting

The factor multiplies what moves x and y (`Moves.UPPER` and `Moves.LOWER`), and settings with the mark `Decays`.
The first iteration has the values that are set. The step λ of a series of products is left alone: the series
begins anew in every iteration, so a smaller λ would only leave out more of it. The learning rate of an optimiser
is left alone too, as Optax has schedules of its own.

A factor depends on the number of the iteration and on nothing else, so a run that is resumed goes on as it would
have. A method is given to an engine with the values of its iteration (`scheduled`), so it needs no code for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Protocol, TypeVar

from pydantic import BeforeValidator

from .errors import SettingsError
from .names import Names
from .settings import Positive, about, choose, named, settings, with_numbers
from .stepsizes import Decays, Moves, marked, step_sizes, value_of

M = TypeVar("M")
Offset = Annotated[Positive, about("after so many iterations, the base of the power has doubled")]


class Schedule(Protocol):
    """How the step sizes of a method change."""

    offset: Offset

    def exponents(self, method: Any) -> Mapping[str, float]:
        """The exponent of each setting that changes."""


@settings
class Constant:
    """Step sizes stay as they are."""

    offset: ClassVar[float] = 1.0

    def exponents(self, method: Any) -> Mapping[str, float]:
        """No setting changes."""
        return {}


@settings
class Power:
    """Step sizes times (1 + t/offset)^(-exponent) in the outer iteration t."""

    exponent: Annotated[Positive, about("the power; 0.5 is 1/sqrt(t)")] = 0.5
    offset: Offset = 1.0

    def exponents(self, method: Any) -> Mapping[str, float]:
        """The same exponent for all step sizes, times the power of those with the mark `Decays`."""
        return {name: self.exponent * power for name, power in decaying(method).items()}


@settings
class Paper:
    """The decay of the method's own paper, in outer iterations."""

    offset: Offset = 1.0

    def exponents(self, method: Any) -> Mapping[str, float]:
        """The exponents that the method declares, of the settings that it uses."""
        return {name: e for name, e in method.decay.items() if isinstance(getattr(method, name), float)}


SCHEDULES: Names[type[Any]] = Names(
    "schedules",
    "algorithm.schedule",
    {"constant": Constant, "power": Power, "paper": Paper},
    needs=("exponents", "offset"),
)


@settings
class Scheduled:
    """A method whose step sizes can follow a schedule.

    decay   the exponents of the method's own paper by setting, for `schedule = "paper"`; empty if it has none
    """

    choices: ClassVar[Mapping[str, Names[type[Any]]]] = {"schedule": SCHEDULES}
    decay: ClassVar[Mapping[str, float]] = {}

    schedule: Annotated[
        Any,
        BeforeValidator(lambda given: choose(SCHEDULES, given, "algorithm.schedule")),
        about("how step sizes change from one outer iteration to the next"),
    ] = Constant()


def decaying(method: Any) -> dict[str, float]:
    """The settings of a method that a schedule multiplies, each with the power of its factor."""
    moving = [each for each in step_sizes(method) if each.moves is not Moves.PRODUCT and "." not in each.setting]
    found = {each.setting: -1.0 if each.inverse else 1.0 for each in moving}
    return found | {name: mark.power for name, mark in marked(method, Decays).items()}


def decay_of(method: Any) -> Mapping[str, float]:
    """The exponent of every setting of a method that changes with the iteration; empty if none does."""
    schedule: Schedule | None = getattr(method, "schedule", None)
    return {} if schedule is None else schedule.exponents(method)


def scheduled(method: M, iteration: Any, exponents: Mapping[str, float] | None = None) -> M:
    """The method with the step sizes of an outer iteration.

    The number of the iteration and the settings may be traced. `exponents` are then those of the method before.
    """
    exponents = decay_of(method) if exponents is None else exponents
    if not exponents:
        return method
    schedule: Schedule = method.schedule  # type: ignore[attr-defined]
    base = 1 + iteration / schedule.offset
    return with_numbers(method, {name: value_of(method, name) * base**-e for name, e in exponents.items()})


def check_schedule(method: Any) -> None:
    """Raise `SettingsError` if the schedule of a method cannot work."""
    schedule = getattr(method, "schedule", None)
    if schedule is None or isinstance(schedule, Constant):
        return
    name = named(SCHEDULES, schedule)["name"]
    if isinstance(schedule, Paper) and not method.decay:
        raise SettingsError(
            f"algorithm.schedule = {name!r} is wrong: {type(method).__name__} has no decay of its own; use "
            "{ name = 'power', exponent = 0.5 }"
        )
    if not decay_of(method):
        raise SettingsError(
            f"algorithm.schedule = {name!r} is wrong: no setting of {type(method).__name__} that it uses changes "
            "with it; remove it (an optimiser has schedules of its own: algorithm.upper.learning_rate)"
        )
    if getattr(method, "memory", 0) and getattr(method, "estimator", None) == "cg":
        raise SettingsError(
            f"algorithm.schedule = {name!r} is wrong with algorithm.memory: quasi-Newton steps have no step size "
            "that could become smaller; remove one of them"
        )
