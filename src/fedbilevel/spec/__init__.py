"""The spec of a run: TOML in, frozen and checked objects out, and back.

A spec has eight sections and a seed. `problem`, `algorithm`, `federation.engine` and `federation.aggregator` have
a `name` that chooses the class whose fields the other keys are.
"""

from .checks import check_parts
from .describing import describe
from .reading import load_spec, parse
from .sections import EvaluateSettings, FederationSettings, StopSettings
from .spec import Spec

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
