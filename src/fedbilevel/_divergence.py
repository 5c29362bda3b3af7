"""Detection of divergence, the setting that is likely to blame, and advice on what to try instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

from .errors import Diverged

EXPLODED = 1e6  # A run has diverged if a loss exceeds this multiple of max(|its first value|, 1).
SUSPECTS = {  # the vector or loss that is no longer finite, and the step size that is likely too large
    "lower_loss": "beta",
    "q": "beta",
    "y": "beta",
    "upper_loss": "alpha",
    "x": "alpha",
    "h": "lam",
    "z": "lam",
    "p": "lam",
}
A = TypeVar("A")


class Restart(NamedTuple):
    """One return of a run to its last good state, with a smaller step size."""

    iteration: int
    setting: str
    before: float
    after: float
    rounds_lost: int
    reason: str


def check_losses(record: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raise `Diverged` if a loss is not finite, or has exploded since the first evaluation."""
    for loss in ("upper_loss", "lower_loss"):
        value, start = record[loss], first[loss]
        if start is None:  # not measured, as in a private run
            continue
        if value is None or value > EXPLODED * max(1.0, abs(start)):
            seen = "is not finite" if value is None else f"exploded from {start:.3g} to {value:.3g}"
            raise Diverged(f"{loss} {seen}, after round {record['rounds']}", [loss])


def suspect(algorithm: Any, error: Diverged) -> tuple[str, float] | None:
    """The setting of the algorithm that is likely too large, and its value."""
    names = [*(SUSPECTS[f] for f in error.fields if f in SUSPECTS), *error.numbers, "alpha", "beta"]
    found = (name for name in names if isinstance(getattr(algorithm, name, None), float))
    name = next(found, None)
    return None if name is None else (name, getattr(algorithm, name))


def advice(algorithm: Any, error: Diverged) -> str:
    """A sentence on what to try."""
    found = suspect(algorithm, error)
    if found is None:
        return ""
    name, value = found
    return f"; algorithm.{name} = {value:g} is likely too large: try {value / 2:g}, or --on-divergence restart"


def smaller(algorithm: A, setting: str, value: float) -> A:
    """The algorithm with another value of a setting."""
    made: A = dataclasses.replace(algorithm, **{setting: value})  # type: ignore[type-var]
    return made
