"""The spec of a run: it is read from TOML into frozen, checked objects, and can be written back.

A spec has eight sections and a seed. `problem`, `algorithm`, `federation.engine` and `federation.aggregator` have
a `name` that chooses a class; the other keys are the fields of that class.
"""

from ._checks import check_fusible, check_parts, check_problem
from ._describing import describe
from ._reading import load_spec, parse, parse_value
from ._sections import EvaluateSettings, FederationSettings, StopSettings
from ._spec import Spec

__all__ = [
    "EvaluateSettings",
    "FederationSettings",
    "Spec",
    "StopSettings",
    "check_fusible",
    "check_parts",
    "check_problem",
    "describe",
    "load_spec",
    "parse",
    "parse_value",
]
