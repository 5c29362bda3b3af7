"""The interface between the federation and the engine that runs the clients.

An engine is given a `Call` and yields the cohort's replies. It draws the samples where the data are. It keeps no
accounts and does not depend on the algorithm.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jax import Array

from ..data import Clients
from ..oracle import Arrays
from ..problem import BilevelProblem, Over
from ..rng import Address
from ._call import Call
from ._replies import Replies
from ._states import ClientStates

MAX_ROWS = 10**7  # the most rows of a part that a remote client may claim, where nothing else is set


class Broken(NamedTuple):
    """A faulty message between neighbours: the fault that was injected, and what the receiver notices."""

    kind: str
    why: str
    lost: bool  # whether the receiver has to do without it


# Whether all stacked arrays are finite, and the weighted mean of each, within a program that JAX traces.
Reduce = Callable[[list[Array], Array], tuple[Array, list[Array]]]
LinkFaults = Callable[[str, Address, Any], Mapping[tuple[int, int], Broken]]


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """What an engine can do beyond running steps. A wrapper passes on the capabilities of the engine it wraps.

    states       the store of the clients' own states if this process has it; None if clients keep it elsewhere
    local_work   whether clients can work locally, without a message; methods without a server need this
    adds_noise   whether the clients themselves add the noise of local privacy
    link_faults  the faults injected into messages between neighbours, by (receiver, sender); None: no faults
    """

    states: ClientStates | None = None
    local_work: bool = True
    adds_noise: bool = False
    link_faults: LinkFaults | None = None


class Engine(Protocol):
    """Runs client steps."""

    @property
    def problem(self) -> BilevelProblem:
        """The problem whose oracle the steps use."""

    @property
    def clients(self) -> Clients:
        """The clients on which steps run."""

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do beyond running steps."""

    def replies(self, call: Call) -> Iterator[Replies]:
        """Run the step on every client of the cohort; yield replies in the order of the cohort."""

    def close(self) -> None:
        """Release data and processes. No more calls follow."""


@runtime_checkable
class Averaging(Protocol):
    """An engine that can take the mean of replies in the program that computes them.

    A layer around such an engine is not one, because it has to see the single replies.
    """

    def average(self, call: Call, weights: np.ndarray, reduce: Reduce) -> Replies | None:
        """All replies of a call, with their mean. None: they have to be asked for by `replies`."""


@runtime_checkable
class Fusible(Protocol):
    """An engine that has the data of all clients at hand, so that whole iterations can be one program.

    A layer around such an engine is not one, because it has to see every round.

    over       whether the program batches clients or serves them in turn
    single     whether the program is compiled into a single function; None: if the operations are small
    programs   the programs of earlier runs on this engine, by what they depend on
    """

    programs: dict[Any, Any]

    @property
    def over(self) -> Over: ...

    @property
    def single(self) -> bool | None: ...

    @property
    def data(self) -> Arrays:
        """The data of all registered clients, padded and stacked."""
