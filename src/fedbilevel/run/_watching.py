"""The progress that a run reports to observers, and the result that it returns."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class Result:
    """A finished run: its folder if it has one, its summary and history, and the final parameters as pytrees."""

    folder: Path | None
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    x: Any
    y: Any


@dataclass(frozen=True)
class Progress:
    """What an observer is told after every outer iteration. `share` is the used share of the budget."""

    iteration: int
    rounds: int
    seconds: float
    share: float
    record: dict[str, Any]


class Observer(Protocol):
    """A function that watches a run: a progress bar, a logger, or the user's own rule for when to stop.

    An observer that returns True ends the run after this iteration. The run is then saved and summarised as at the
    end of its budget.
    """

    def __call__(self, progress: Progress, /) -> bool | None: ...
