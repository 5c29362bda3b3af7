"""What a rule is: a callable, which may also say how many replies it needs."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np

from ..errors import SettingsError


class Rule(Protocol):
    """Aggregates the rows of one field: (n, d) float32 and n weights give d numbers.

    This is all that a rule needs. One that is `Quorate` also says how many replies it needs.
    """

    def __call__(self, rows: np.ndarray, weights: np.ndarray, /) -> np.ndarray: ...


@runtime_checkable
class Quorate(Protocol):
    """A rule that says how many replies it needs.

    fewest   the smallest number of replies of which one may be a lie. With this number and with every larger one,
             a single liar cannot move the result further than honest replies differ
    """

    @property
    def fewest(self) -> int: ...


def quorum(rule: object) -> int:
    """The smallest number of replies that a rule may be given; one if it does not say."""
    if not isinstance(rule, Quorate):
        return 1
    fewest = rule.fewest
    if type(fewest) is not int or fewest < 1:
        name = type(rule).__name__
        raise SettingsError(f"{name}.fewest = {fewest!r} is wrong: a rule needs a whole number of replies, from 1")
    return fewest
