"""A row of an application in one of its columns, with what its runs gave."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..spec import Spec
from .application import Application, Column, Row

SHARES = ("accuracy", "auc", "precision", "recall")  # metrics that are shares, and are shown in per cent


@dataclass
class Cell:
    """A row in a column.

    chosen    the point that was chosen; None if all diverged
    tried     the value of `select` at each point; None if it diverged
    specs     the runs of the chosen point, as they were run
    values    the metrics of the table at the end of each of them; None if it diverged
    cosine    between the way of x and the true hypergradient, if the application asks for it
    missing   whether runs of it are missing, so that nothing is known of it
    at_bytes  the metric of the table of each run, after the bytes of the row in its column that sends least
    """

    row: Row
    column: Column
    tried: list[float | None] = field(default_factory=list)
    chosen: dict[str, Any] | None = None
    specs: list[Spec] = field(default_factory=list)
    values: dict[str, list[float | None]] = field(default_factory=dict)
    cosine: float | None = None
    at_bytes: list[float] = field(default_factory=list)
    missing: bool = False

    def mean(self, metric: str) -> float | None:
        """The mean over the seeds; None if a seed lacks the metric."""
        known = self._known(metric)
        return None if known is None else float(np.mean(known))

    def deviation(self, metric: str) -> float:
        """The standard deviation of the seeds, with n - 1."""
        known = self._known(metric)
        return float(np.std(known, ddof=1)) if known is not None and len(known) > 1 else 0.0

    def _known(self, metric: str) -> list[float] | None:
        values = self.values.get(metric, [])
        known = [value for value in values if value is not None]
        return known if known and len(known) == len(values) else None


def leader(cells: Sequence[Cell], application: Application) -> Cell | None:
    """The cell with the best mean of the metric of the table."""
    sign = 1.0 if application.mode == "max" else -1.0
    return max(cells, key=lambda cell: sign * (cell.mean(application.metric) or 0.0), default=None)


def is_share(metric: str) -> bool:
    """Whether a metric is a share, which is shown in per cent."""
    return metric.endswith(SHARES)


def shown(cell: Cell, metric: str) -> str:
    """A mean and its deviation; a dash if the row does not have the metric."""
    mean, deviation = cell.mean(metric), cell.deviation(metric)
    if cell.missing:
        return "not run"
    if mean is None:
        failed = sum(value is None for value in cell.values.get(metric, [])) if cell.chosen else 0
        return "diverged" if cell.chosen is None or (metric.startswith("test") and failed) else "-"
    return f"{100 * mean:.2f} ± {100 * deviation:.2f}" if is_share(metric) else f"{mean:.4g} ± {deviation:.2g}"
