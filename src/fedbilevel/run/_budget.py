"""When a run is over."""

from __future__ import annotations

from typing import Any

from .. import processes
from ..federation import Federation
from ..spec import StopSettings


class Budget:
    """When a run is over.

    An outer iteration that would exceed the rounds is not begun, as far as its cost is known: the first one
    always is. Clocks differ, so of several processes the first decides.
    """

    def __init__(self, stop: StopSettings, fed: Federation) -> None:
        self._stop, self._fed = stop, fed

    def spent(self, iteration: int, record: dict[str, Any]) -> bool:
        """Whether no further iteration is begun."""
        ledger, stop = self._fed.ledger, self._stop
        cost = ledger.rounds // iteration if iteration else 0
        spent = bool(
            (stop.rounds is not None and ledger.rounds + max(cost, 1) > stop.rounds)
            or (stop.iterations is not None and iteration >= stop.iterations)
            or (stop.seconds is not None and ledger.seconds >= stop.seconds)
            or (stop.accuracy is not None and (record.get("test_accuracy") or 0.0) >= stop.accuracy)
        )
        return processes.from_first(lambda: spent)

    def share(self, iteration: int, record: dict[str, Any]) -> float:
        """How much of the budget is used, from 0 to 1."""
        ledger, stop = self._fed.ledger, self._stop
        if self.spent(iteration, record):
            return 1.0
        parts = [(ledger.rounds, stop.rounds), (iteration, stop.iterations), (ledger.seconds, stop.seconds)]
        return max((used / limit for used, limit in parts if limit is not None), default=0.0)
