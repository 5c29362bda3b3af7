"""Putting replies together: the mean, rules that hold against liars, and the mixing of gossip."""

from .mean import Accumulator, Mean, mix, not_finite, present
from .rules import RULES, CentredClipping, GeometricMedian, Median, NormBound, Rows, Rule, TrimmedMean

__all__ = [
    "RULES",
    "Accumulator",
    "CentredClipping",
    "GeometricMedian",
    "Mean",
    "Median",
    "NormBound",
    "Rows",
    "Rule",
    "TrimmedMean",
    "mix",
    "not_finite",
    "present",
]
