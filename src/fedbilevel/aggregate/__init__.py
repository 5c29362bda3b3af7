"""Aggregation of replies: the mean, rules that are robust to liars, and the mixing of gossip."""

from ._mean import Accumulator, Mean, mix, not_finite
from ._rules import (
    AGGREGATORS,
    CentredClipping,
    Gather,
    GeometricMedian,
    Median,
    NormBound,
    Rows,
    Rule,
    TrimmedMean,
    WeightedMean,
    gather_by,
)

__all__ = [
    "AGGREGATORS",
    "Accumulator",
    "CentredClipping",
    "Gather",
    "GeometricMedian",
    "Mean",
    "Median",
    "NormBound",
    "Rows",
    "Rule",
    "TrimmedMean",
    "WeightedMean",
    "gather_by",
    "mix",
    "not_finite",
]
