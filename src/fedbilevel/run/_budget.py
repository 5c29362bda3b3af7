"""The budget of a run."""

from __future__ import annotations

from typing import Any

from .. import processes
from ..federation import Federation
from ..spec import StopSettings


class Budget:
    """Decides when a run is over.

    An outer iteration that would exceed the limit on rounds is not begun. The cost of the first one is unknown, so
    it is always begun. With several processes the first one decides, because their clocks differ.
    """

    def __init__(self, stop: StopSettings, fed: Federation) -> None:
        self._stop, self._fed = stop, fed

    def spent(self, iteration: int, record: dict[str, Any]) -> bool:
        """Whether the budget is spent, so that no further iteration is begun."""
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
        """The share of the budget that is used, from 0 to 1."""
        ledger, stop = self._fed.ledger, self._stop
        if self.spent(iteration, record):
            return 1.0
        parts = [(ledger.rounds, stop.rounds), (iteration, stop.iterations), (ledger.seconds, stop.seconds)]
        return max((used / limit for used, limit in parts if limit is not None), default=0.0)
