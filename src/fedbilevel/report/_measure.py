"""Which number of a history a curve shows, when nobody has named one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

from ..errors import SettingsError, UnknownName

ACCURACY = "test_accuracy"
LABELS = {  # in the order in which they are preferred
    ACCURACY: "test accuracy",
    "hypergradient_norm": "norm of the true hypergradient",
    "upper_loss": "upper loss",
}
COUNTS = ("iteration", "rounds", "bytes_up", "bytes_down", "seconds")  # what a curve is drawn against
History = Sequence[Mapping[str, Any]]


def measured(history: History) -> list[str]:
    """The names of the numbers that a history has, without the counts."""
    names = dict.fromkeys(name for record in history for name, value in record.items() if _is_number(value))
    return [name for name in names if name not in COUNTS]


def shared_measure(histories: Sequence[History], asked: str | None = None) -> str:
    """The number that curves of all of these histories show: the one that is asked for, or the best known."""
    common = set.intersection(*(set(measured(history)) for history in histories))
    if asked is not None:
        if asked not in common:
            raise UnknownName("--measure", asked, common)
        return asked
    for name in (*LABELS, *sorted(common)):
        if name in common:
            return name
    raise SettingsError("these runs have no measurement in common; compare runs of one problem, or fewer of them")


def points(history: History, measure: str) -> list[tuple[Mapping[str, Any], float]]:
    """The records in which the number is there, with the number."""
    return [(record, float(record[measure])) for record in history if _is_number(record.get(measure))]


def metric_text(name: str, value: float) -> str:
    """A value of a metric, for people: accuracies in per cent."""
    return f"{value:.2%}" if name.endswith("accuracy") else f"{value:.4g}"


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
