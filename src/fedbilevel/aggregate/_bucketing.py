"""Bucketing: another rule on the means of random buckets of replies (Karimireddy, He, Jaggi 2022)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Annotated, Any, ClassVar

import numpy as np

from ..names import Names
from ..rng import Address
from ..settings import Count, about, choose, settings
from ._krum import MultiKrum
from ._rule import START, Place, Rule, placed, quorum, remembers
from ._rules import CentredClipping, GeometricMedian, Median, NormBound, TrimmedMean, weighted_mean

# The rules that can also be applied to buckets. The mean of the means of buckets would not be robust.
RULES: Mapping[str, type[Any]] = {
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "geometric-median": GeometricMedian,
    "centred-clipping": CentredClipping,
    "norm-bound": NormBound,
    "multi-krum": MultiKrum,
}
WITHIN: Names[type[Any]] = Names("aggregators", "federation.aggregator.rule.name", RULES, needs=("__call__",))


@settings
class Bucketing:
    """Another rule, on the means of random buckets of s replies.

    The means differ less than the replies where clients differ, and a liar spoils one bucket only. The rule counts
    buckets: of n replies it is given ceil(n / s), the last of which may be smaller, and f liars are in at most f
    of them. Buckets count equally, as published; the mean of a bucket is by weight.

    The buckets of a round are drawn at its address and are the same for all fields. Liars who find the seed know
    their buckets; what they can spoil is at most a bucket each in any case.
    """

    choices: ClassVar[Mapping[str, Names[type[Any]]]] = {"rule": WITHIN}

    size: Annotated[Count, about("s, the number of replies in a bucket")] = 2
    rule: Annotated[Any, about("the rule that aggregates the means of the buckets")] = dataclasses.field(
        default_factory=Median
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", choose(WITHIN, self.rule, "federation.aggregator.rule"))

    @property
    def fewest(self) -> int:
        """The smallest number of replies that make as many buckets as the rule needs."""
        return self.size * (quorum(self.rule) - 1) + 1

    @property
    def remembers(self) -> bool:
        """Whether the rule for the buckets goes on from its last result."""
        return remembers(self.rule)

    def at(self, place: Place) -> Rule:
        """The rule at a place in the run, with the buckets of its round."""
        return partial(self._bucketed, placed(self.rule, place), place.address)

    def __call__(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        return self._bucketed(self.rule, START, rows, weights)

    def _bucketed(self, rule: Rule, address: Address, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        order = address.generator("buckets").permutation(len(rows))
        buckets = [order[first : first + self.size] for first in range(0, len(rows), self.size)]
        means = np.stack([weighted_mean(rows[bucket], weights[bucket]) for bucket in buckets])
        return rule(means, np.ones(len(buckets)))
