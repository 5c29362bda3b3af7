"""An engine for small problems: it has the data of all clients on one device, ready for a program of many rounds.

A round of the simulation costs milliseconds of the host whatever is in it. Where the computation of a round takes
microseconds, a run is faster if the rounds of an outer iteration, and of many, are inside of one program (the room
`fused` makes it). This engine has what that program needs. Rounds that are asked for one by one are those of the
simulation: measurements, and the rounds of a block in which a reply was not valid.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import jax
import numpy as np

from ..data import Clients
from ..errors import SettingsError
from ..oracle import Arrays
from ..problem import BilevelProblem, Over
from ._base import Capabilities, Reduce
from ._call import Call
from ._replies import Replies
from ._work import need_traceable, pad
from .simulation import MIB, Simulation


class Fused:
    """Runs whole outer iterations as one program, and single rounds as the simulation does.

    over            "vmap" batches the clients, "map" serves them in turn (default: the problem's choice)
    memory_limit    MiB for the data of all clients
    single          whether XLA compiles the program into a single function, which is faster if the operations are
                    small, and slower if they are large (default: by the size of the data)
    """

    def __init__(
        self,
        problem: BilevelProblem,
        clients: Clients,
        *,
        over: Over | None = None,
        memory_limit: int = 1024,
        single: bool | None = None,
    ) -> None:
        need_traceable(problem, "fused")
        if jax.process_count() > 1:
            raise SettingsError("federation.engine = 'fused' is wrong for several processes; use 'simulation'")
        one = pad(clients.load(0), clients.capacity)
        size = clients.count * sum(np.asarray(leaf).nbytes for leaf in jax.tree.leaves(one))
        if size > memory_limit * MIB:
            raise SettingsError(
                f"federation.engine = 'fused' is wrong here: the data of {clients.count} clients take "
                f"{size / MIB:.0f} MiB, and memory_limit is {memory_limit}; use 'simulation', or a higher limit"
            )
        self.problem, self.clients, self.over = problem, clients, over or problem.over
        self.single, self.programs = single, dict[Any, Any]()
        self.measurements = dict[Any, Any]()  # programs that measure many runs at once
        self._rounds = Simulation(problem, clients, over=over, memory_limit=memory_limit, devices=1)

    @property
    def capabilities(self) -> Capabilities:
        """What the engine can do beyond running steps."""
        return self._rounds.capabilities

    @cached_property
    def data(self) -> Arrays:
        """The data of all clients, padded and stacked, on the device."""
        return self._rounds.load(tuple(range(self.clients.count)))

    def replies(self, call: Call) -> Iterator[Replies]:
        """The replies of one round, which is then run as the simulation runs it."""
        return self._rounds.replies(call)

    def average(self, call: Call, weights: np.ndarray, reduce: Reduce) -> Replies | None:
        """The average of the replies of one round, as the simulation computes it."""
        return self._rounds.average(call, weights, reduce)

    def close(self) -> None:
        """Forget data and compiled programs."""
        self.__dict__.pop("data", None)
        self.programs.clear()
        self.measurements.clear()
        self._rounds.close()
