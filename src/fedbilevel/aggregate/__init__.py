"""Aggregation of replies: the mean, rules that are robust to liars, and the mixing of gossip."""

from __future__ import annotations

from typing import Any

from ..names import Names
from ._bucketing import RULES, Bucketing
from ._gather import Gather, Rows, gather_by, remembering, rule_of
from ._krum import MultiKrum
from ._mean import Accumulator, Apart, Mean, all_finite, finite_mean, mix, not_finite
from ._rule import Memory, Place, Placed, Quorate, Rule, quorum
from ._rules import CentredClipping, GeometricMedian, Median, NormBound, TrimmedMean, WeightedMean
from ._traced import Traceable, TracedRule, traced_rule

AGGREGATORS: Names[type[Any]] = Names(
    "aggregators",
    "federation.aggregator.name",
    {"mean": WeightedMean, **RULES, "bucketing": Bucketing},
    needs=("__call__",),
)

__all__ = [
    "AGGREGATORS",
    "Accumulator",
    "Apart",
    "Bucketing",
    "CentredClipping",
    "Gather",
    "GeometricMedian",
    "Mean",
    "Median",
    "Memory",
    "MultiKrum",
    "NormBound",
    "Place",
    "Placed",
    "Quorate",
    "Rows",
    "Rule",
    "Traceable",
    "TracedRule",
    "TrimmedMean",
    "WeightedMean",
    "all_finite",
    "finite_mean",
    "gather_by",
    "mix",
    "not_finite",
    "quorum",
    "remembering",
    "rule_of",
    "traced_rule",
]
