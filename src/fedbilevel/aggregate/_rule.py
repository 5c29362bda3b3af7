"""What a rule is: a callable, which may also say how many replies it needs, and may draw and remember."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import SettingsError
from ..rng import Address, Kind

# What rules remember of a run: for each step, what the rule returned in its last round, field by field.
Memory = dict[str, dict[str, np.ndarray]]
START = Address(0, Kind.ROUND, 0)


class Rule(Protocol):
    """Aggregates the rows of one field: (n, d) float32 and n weights give d numbers.

    This is all that a rule needs. One that is `Quorate` also says how many replies it needs, and the result of one
    that is `Placed` depends on the place in the run.
    """

    def __call__(self, rows: np.ndarray, weights: np.ndarray, /) -> np.ndarray: ...


@runtime_checkable
class Quorate(Protocol):
    """A rule that says how many replies it needs.

    fewest   the smallest number of replies of which one may be a lie. With this number and with every larger one,
             honest replies bound how far a single liar can move the result, however large its lie is
    """

    @property
    def fewest(self) -> int: ...


class Place(NamedTuple):
    """Where in a run a rule is used. The default is a round without a past, such as the first one of a run.

    address   the address of the round, for a rule that draws
    last      what the rule returned for this field in the last round of the same step, for a rule that remembers;
              None if that round had no such field, or one of another size
    """

    address: Address = START
    last: np.ndarray | None = None


@runtime_checkable
class Placed(Protocol):
    """A rule that draws or remembers. It is a settings object and stays as it is: the run has its memory.

    remembers   whether it uses `Place.last`; what it returns is then part of the checkpoints of a run
    """

    @property
    def remembers(self) -> bool: ...

    def at(self, place: Place) -> Rule:
        """The rule at one place in the run, for one field."""


def placed(rule: Rule, place: Place) -> Rule:
    """A rule at a place in the run; itself if it neither draws nor remembers."""
    return rule.at(place) if isinstance(rule, Placed) else rule


def remembers(rule: Rule) -> bool:
    """Whether a rule remembers what it returned."""
    return isinstance(rule, Placed) and rule.remembers


def quorum(rule: object) -> int:
    """The smallest number of replies that a rule may be given; one if it does not say."""
    if not isinstance(rule, Quorate):
        return 1
    fewest = rule.fewest
    if type(fewest) is not int or fewest < 1:
        name = type(rule).__name__
        raise SettingsError(f"{name}.fewest = {fewest!r} is wrong: a rule needs a whole number of replies, from 1")
    return fewest
