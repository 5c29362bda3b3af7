"""Metrics: the numbers of a history that are measured, and which direction of each is better."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal

Mode = Literal["max", "min"]
COUNTED = ("iteration", "rounds", "bytes_up", "bytes_down", "seconds", "restarts")  # numbers that are no metrics
SMALLER = ("loss", "norm", "error", "gap", "residual", "epsilon", "estimate", "update_x", "update_y")


def direction(metric: str) -> Mode:
    """Whether a larger or a smaller value is better by default: smaller for the names of losses and errors."""
    return "min" if metric.endswith(SMALLER) else "max"


def better(a: float, b: float, mode: Mode) -> bool:
    """Whether the value a is better than b."""
    return a > b if mode == "max" else a < b


def metric_names(history: Iterable[Mapping[str, Any]]) -> list[str]:
    """The metrics of a history in the order in which they appear. A line may lack some of them."""
    names = dict.fromkeys(
        name
        for record in history
        for name, value in record.items()
        if name not in COUNTED and isinstance(value, int | float) and not isinstance(value, bool)
    )
    return list(names)
