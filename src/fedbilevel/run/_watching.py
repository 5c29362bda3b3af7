"""The progress that a run reports to observers, and the result that it returns."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

from ..errors import SettingsError
from ._personal import NEWCOMER, Newcomer


@dataclass(frozen=True)
class Result:
    """A finished run: its folder if it has one, its summary and history, and the final parameters as pytrees.

    own     the own variables of every client, by its number; None if there are none, or they are at the sites
    lower   the y of every client that has kept one of its own, by its number, for a local lower level; y itself is
            then where new clients start. None if clients keep none, or keep it at the sites
    """

    folder: Path | None
    summary: dict[str, Any]
    history: list[dict[str, Any]]
    x: Any
    y: Any
    own: Mapping[int, Any] | None = None
    lower: Mapping[int, Any] | None = None
    joining: Callable[..., Newcomer] | None = field(default=None, repr=False, compare=False)

    def join(self, rows: Any, test: Any = None, *, steps: int = NEWCOMER, seed: int = 0) -> Newcomer:
        """What a client gets that joins after the run, with a local lower level: its own y, and its metrics.

        rows    the client's rows, on which it finds its y: inputs, or a pair of inputs and targets
        test    rows for its metrics; without them only its loss is measured
        steps   how many lower steps it makes from the y of the problem, at the trained x
        """
        if self.joining is None:
            raise SettingsError("the run was on a real federation, and no problem is here; use load_run(...).join")
        return self.joining(rows, test, steps=steps, seed=seed)

    @property
    def failure(self) -> str | None:
        """Why the run did not reach its end, or None. `train` raises this, and `train_many` does not."""
        reason = self.summary.get("failure")
        return None if reason is None else str(reason)


def _elsewhere() -> tuple[Any, Any]:
    raise SettingsError(
        "progress.x and progress.y are not known here: on a real federation the parameters are at the server; "
        "read them from the result of the run"
    )


@dataclass(frozen=True)
class Progress:
    """What an observer is told after every outer iteration. `share` is the used share of the budget.

    `x` and `y` are the parameters as pytrees. They are restored when they are asked for. `notes` are lines
    about the step sizes of the run, each told once.
    """

    iteration: int
    rounds: int
    seconds: float
    share: float
    record: dict[str, Any]
    parameters: Callable[[], tuple[Any, Any]] = field(default=_elsewhere, repr=False, compare=False)
    notes: tuple[str, ...] = ()

    @cached_property
    def x(self) -> Any:
        """The upper parameters."""
        return self.parameters()[0]

    @cached_property
    def y(self) -> Any:
        """The lower parameters."""
        return self.parameters()[1]

    @classmethod
    def from_mapping(cls, given: Mapping[str, Any]) -> Progress:
        """The progress that `to_mapping` gave, also after JSON, which has no tuples."""
        return cls(**{**given, "notes": tuple(given.get("notes", ()))})

    def to_mapping(self) -> dict[str, Any]:
        """The progress without the parameters, as plain values."""
        names = ("iteration", "rounds", "seconds", "share", "record", "notes")
        return {name: getattr(self, name) for name in names}


class Observer(Protocol):
    """A function that watches a run: a progress bar, a logger, or the user's own rule for when to stop.

    An observer that returns True ends the run after this iteration. The run is then saved and summarised as at the
    end of its budget.
    """

    def __call__(self, progress: Progress, /) -> bool | None: ...
