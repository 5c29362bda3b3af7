"""What the runs of a method on a problem show: the time until it stays below a target, and curves of quantiles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..record import Mode
from ._problems import BoardProblem

History = Sequence[Mapping[str, Any]]
LAST = 0.1  # the share of a run at its end over which a metric is averaged
QUANTILES = (0.2, 0.5, 0.8)
POINTS = 60  # of a curve


class Axis(NamedTuple):
    """What a run is measured against: the key of its numbers, and what they are."""

    key: str
    label: str


AXES = (
    Axis("rounds", "communication rounds"),
    Axis("megabytes", "MB up and down, a registered client"),
    Axis("work", "gradient equivalents, a registered client"),
    Axis("seconds", "seconds of training"),
)


class Seen(NamedTuple):
    """One evaluation of a run: its place on each axis, and the shown metric."""

    at: dict[str, float]
    value: float


def seen(history: History, problem: BoardProblem, work: Sequence[float], clients: int) -> list[Seen]:
    """A run as it is shown. `work[k]` is what a registered client has computed in k outer iterations."""
    values = [(record, record.get(problem.show)) for record in history]
    first = next((value for _, value in values if value is not None), None)
    unit = first if problem.relative and first else 1.0
    return [
        Seen(
            {
                "rounds": record["rounds"],
                "megabytes": (record["bytes_up"] + record["bytes_down"]) / 1e6 / clients,
                "work": work[record["iteration"]],
                "seconds": record["seconds"],
            },
            value / unit,
        )
        for record, value in values
        if value is not None
    ]


def at_the_end(history: History, metric: str) -> float | None:
    """The mean of a metric over the last tenth of the rounds; None if it is not there or not finite."""
    values = [(r["rounds"], r[metric]) for r in history if r.get(metric) is not None]
    if not values:
        return None
    late = [value for rounds, value in values if rounds >= (1 - LAST) * values[-1][0]]
    found = float(np.mean(late))
    return found if np.isfinite(found) else None


def stays(run: Sequence[Seen], target: float, mode: Mode) -> dict[str, float] | None:
    """The place from which on a run is at the target or better until its end; None if it is not at its end.

    A run that dips below and comes back has not arrived.
    """
    found = None
    for each in reversed(run):
        if not (each.value <= target if mode == "min" else each.value >= target):
            break
        found = each.at
    return found


def curve(runs: Sequence[Sequence[Seen]]) -> dict[str, Any]:
    """The quantiles over the runs at each evaluation, and the median of its place on each axis."""
    length = max(map(len, runs))
    chosen = sorted({*np.linspace(0, length - 1, min(POINTS, length)).round().astype(int).tolist()})
    made: dict[str, Any] = {"x": {axis.key: [] for axis in AXES}, "low": [], "mid": [], "high": []}
    for place in chosen:
        there = [run[place] for run in runs if place < len(run)]
        for axis in AXES:
            made["x"][axis.key].append(_short(float(np.median([each.at[axis.key] for each in there]))))
        for name, value in zip(("low", "mid", "high"), _quantiles([each.value for each in there]), strict=True):
            made[name].append(_short(value))
    return made


def _quantiles(values: Sequence[float]) -> list[float]:
    return [float(value) for value in np.quantile(np.asarray(values, np.float64), QUANTILES)]


def _short(value: float) -> float | None:
    return float(f"{value:.4g}") if np.isfinite(value) else None
