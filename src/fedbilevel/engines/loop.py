"""One client at a time, unbatched: slow, easy to debug, and names the client in an error."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import numpy as np

from ..data.clients import Clients
from ..errors import FedBilevelError, StepError
from ..oracle import remember
from ..problem import Problem
from .base import Call, Replies, pad, perform, prepare


class Loop:
    """Runs the cohort's clients one after the other in this process."""

    def __init__(self, problem: Problem, clients: Clients) -> None:
        self.problem, self.clients = problem, clients
        self._programs: dict[Any, Any] = {}
        self._remember = jax.jit(partial(remember, problem))
        self._kept: dict[int, tuple[int, Any]] = {}

    def replies(self, call: Call) -> Iterator[Replies]:
        for client in call.clients:
            try:
                reply = self._reply(call, client)
            except FedBilevelError:
                raise
            except Exception as error:
                raise StepError(f"client {client}, {call}: {type(error).__name__}: {error}") from error
            yield Replies((client,), jax.tree.map(lambda a: a[None], reply))

    def close(self) -> None:
        self._kept.clear()

    def _reply(self, call: Call, client: int) -> Any:
        capacity = self.clients.capacity
        data = pad(self.clients.load(client), capacity)
        own = {name: np.asarray(each.values[client], np.float32) for name, each in call.own.items()}
        draws = prepare(call, client, self.clients.size(client), capacity)
        memory = None
        if "x" in call.held:
            held = call.held["x"]
            if client not in self._kept or self._kept[client][0] != held.version:
                self._kept = {c: k for c, k in self._kept.items() if k[0] == held.version}
                self._kept[client] = held.version, self._remember(held.value, data)
            memory = self._kept[client][1]
        program = self._programs.setdefault(
            call.program, jax.jit(lambda *arguments: perform(self.problem, call, *arguments))
        )
        return program(call.vectors, call.arrays, own, draws, data, memory)
