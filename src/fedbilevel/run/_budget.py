"""The budget of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from .. import processes
from ..federation import Federation
from ..record import better
from ..spec import StopSettings

NEAR = 2  # the cost of an iteration is counted beforehand if the limit is at most this many iterations away
BETWEEN_LOOKS = 16  # the most iterations between two looks at the clock
Records = Sequence[Mapping[str, Any]]


class Budget:
    """Decides when a run is over.

    An outer iteration that would exceed the limit on rounds is not begun, and neither is the first one. `rehearse`
    counts the rounds of the next iteration beforehand; None means that this method's cannot be counted, and then
    the next one is taken to cost what the earlier ones did on average, the first one a single round. With several
    processes the first one decides, because their clocks differ.
    """

    def __init__(self, stop: StopSettings, fed: Federation, rehearse: Callable[[], int | None]) -> None:
        self._stop, self._fed, self._rehearse = stop, fed, rehearse
        self._counted: tuple[int, int] | None = None  # an iteration, and the rounds of the one after it

    def spent(self, iteration: int, records: Records) -> bool:
        """Whether the budget is spent, so that no further iteration is begun."""
        ledger, stop = self._fed.ledger, self._stop
        spent = bool(
            (stop.iterations is not None and iteration >= stop.iterations)
            or (stop.seconds is not None and ledger.seconds >= stop.seconds)
            or any(goal.reached(records[-1]) for goal in stop.goals)
            or (stop.patience is not None and self._stalled(records) >= stop.patience)
            or (stop.rounds is not None and ledger.rounds + self._cost(iteration, stop.rounds) > stop.rounds)
        )
        return processes.from_first(lambda: spent)

    def share(self, iteration: int, records: Records) -> float:
        """The share of the budget that is used, from 0 to 1."""
        ledger, stop = self._fed.ledger, self._stop
        if self.spent(iteration, records):
            return 1.0
        parts = [(ledger.rounds, stop.rounds), (iteration, stop.iterations), (ledger.seconds, stop.seconds)]
        return max((used / limit for used, limit in parts if limit is not None), default=0.0)

    def _stalled(self, records: Records) -> int:
        """The number of evaluations since the best value of the metric."""
        best, since = None, 0
        for record in records:
            value = record.get(self._stop.metric or "")
            if value is not None and (best is None or better(value, best, self._stop.direction)):
                best, since = value, 0
            elif best is not None:
                since += 1
        return since

    def ahead(self, iteration: int, most: int, costs: Callable[[int], Iterable[int]]) -> int:
        """How many iterations may be begun without a look at the budget in between, at least one.

        most     at most so many
        costs    costs(n) gives the rounds of each of the next n iterations
        """
        stop, rounds = self._stop, self._fed.ledger.rounds
        if stop.iterations is not None:
            most = min(most, stop.iterations - iteration)
        if stop.seconds is not None:
            most = min(most, BETWEEN_LOOKS)
        if stop.rounds is None:
            return max(most, 1)
        for count, cost in enumerate(costs(most)):
            mean = self._mean(iteration + count, rounds, stop.rounds)
            if count and rounds + (cost if mean is None else mean) > stop.rounds:
                return count
            rounds += cost
        return max(most, 1)

    @staticmethod
    def _mean(iteration: int, rounds: int, limit: int) -> int | None:
        """The rounds of an iteration on average; None if the limit is so near that they have to be counted."""
        mean = max(rounds // iteration, 1) if iteration else 1
        return mean if iteration and rounds + NEAR * mean <= limit else None

    def _cost(self, iteration: int, limit: int) -> int:
        """The rounds of the next iteration."""
        rounds = self._fed.ledger.rounds
        far = self._mean(iteration, rounds, limit)
        if far is not None:
            return far
        mean = max(rounds // iteration, 1) if iteration else 1
        if self._counted is None or self._counted[0] != iteration:
            rehearsed = self._rehearse()
            self._counted = iteration, mean if rehearsed is None else rehearsed
        return self._counted[1]
