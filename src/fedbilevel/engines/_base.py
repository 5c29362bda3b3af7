"""The interface between the federation and what runs the clients.

An engine is given a `Call` and yields the cohort's replies. It draws the samples where the data are, counts
nothing, and knows no algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from ..data import Clients
from ..problem import BilevelProblem
from ..rng import Address
from ._call import Call
from ._replies import Replies
from ._states import ClientStates


class Broken(NamedTuple):
    """A message between neighbours that goes wrong: the fault that was made, and what the receiver notices."""

    kind: str
    why: str
    lost: bool  # whether the receiver has to do without it


LinkFaults = Callable[[str, Address, Any], Mapping[tuple[int, int], Broken]]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do beyond running steps. A wrapper passes on those of the engine that it wraps.

    states       where the clients' own state is, if this process has it; None where clients keep it elsewhere
    local_work   whether clients can work for themselves, without a message, as methods without a server need
    adds_noise   whether the clients themselves add the noise of local privacy
    link_faults  faults made on purpose in messages between neighbours, by (receiver, sender); None makes none
    """

    states: ClientStates | None = None
    local_work: bool = True
    adds_noise: bool = False
    link_faults: LinkFaults | None = None


class Engine(Protocol):
    """What runs client steps."""

    @property
    def problem(self) -> BilevelProblem: ...

    @property
    def clients(self) -> Clients: ...

    @property
    def capabilities(self) -> Capabilities: ...

    def replies(self, call: Call) -> Iterator[Replies]:
        """Run the step on every client of the cohort; yield replies in the order of the cohort."""

    def close(self) -> None:
        """Let go of data, and of processes; there are no more calls."""
