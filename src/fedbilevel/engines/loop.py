"""An engine that runs one client at a time. It is slow but easy to debug, and its errors name the client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

from ..data import Clients
from ..errors import FedBilevelError, StepError
from ..problem import BilevelProblem
from ._base import Capabilities
from ._call import Call
from ._replies import Replies
from ._states import ClientStates
from ._work import load_padded, load_unpadded, native, perform, perform_untraced, prepare, recalled


class Loop:
    """Runs the cohort's clients one after the other in this process.

    Steps are compiled if JAX can trace the problem's oracle, and run uncompiled otherwise.

    states    the store of the clients' own states (default: a store in memory)
    """

    def __init__(self, problem: BilevelProblem, clients: Clients, *, states: ClientStates | None = None) -> None:
        self.problem, self.clients = problem, clients
        self._states = ClientStates() if states is None else states
        self.capabilities = Capabilities(states=self._states)
        self._programs: dict[Any, Any] = {}
        self._remember = jax.jit(problem.remember) if problem.traceable else problem.remember
        self._memories: dict[int, tuple[int, Any]] = {}

    def replies(self, call: Call) -> Iterator[Replies]:
        """Run the step on one client after another."""
        for client in call.clients:
            try:
                reply = self._reply(call, client)
            except FedBilevelError:
                raise
            except Exception as error:
                raise StepError(f"client {client}, {call}: {type(error).__name__}: {error}") from error
            yield Replies(clients=(client,), reply=jax.tree.map(lambda a: a[None], reply))

    def close(self) -> None:
        """Forget what clients remember and keep."""
        self._memories.clear()
        self._states.clear()

    def _reply(self, call: Call, client: int) -> Any:
        # A step that is not traced has no shapes to keep, so its rows are not padded.
        size = self.clients.size(client)
        capacity = self.clients.capacity if self.problem.traceable else size
        traced = self.problem.traceable
        data = load_padded(self.clients, client) if traced else load_unpadded(self.clients, client)
        rows = {name: np.asarray(each.values[client], np.float32) for name, each in call.rows.items()}
        draws = prepare(call, self.problem, client, size, capacity)
        kept = recalled(call, self.problem, self._states, client, capacity)
        memory = None
        if "x" in call.held:
            held = call.held["x"]
            if client not in self._memories or self._memories[client][0] != held.version:
                self._memories = {c: m for c, m in self._memories.items() if m[0] == held.version}
                x: Any = held.value if self.problem.traceable else native(self.problem, held.value)
                self._memories[client] = held.version, self._remember(x, data)
            memory = self._memories[client][1]
        if call.program not in self._programs:

            def program(*arguments: Any) -> Any:
                work = perform if self.problem.traceable else perform_untraced
                return work(self.problem, call, *arguments)

            self._programs[call.program] = jax.jit(program) if self.problem.traceable else program
        given = call.vectors, call.arrays, rows, draws, kept, data, memory
        reply, own = self._programs[call.program](*given)
        if own:
            self._states.write(client, call.clock, own, call.settled)
        return reply
