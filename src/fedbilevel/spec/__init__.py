"""The spec of a run: TOML in, frozen and checked objects out, and back.

A spec has eight sections and a seed. `problem`, `algorithm`, `federation.engine` and `federation.aggregator` have
a `name` that chooses the class whose fields the other keys are.
"""

from ._checks import check_parts
from ._describing import describe
from ._reading import load_spec, parse
from ._sections import EvaluateSettings, FederationSettings, StopSettings
from ._spec import Spec

__all__ = [
    "EvaluateSettings",
    "FederationSettings",
    "Spec",
    "StopSettings",
    "check_parts",
    "describe",
    "load_spec",
    "parse",
]
