"""An engine whose clients answer whatever a test wants, and a step that only the server evaluates, abstractly."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.data import ClientData, ClientSize, Part
from fedbilevel.engines import Call, Capabilities, Engine, Replies
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Problem
from fedbilevel.steps import Draw, Next, X, Y, client_step

ALL = Draw(None, None)


class Reply(NamedTuple):
    y: Next[Y]
    h: X | None


@client_step
def answer(c: Oracle, y: Array) -> Reply:
    """A new value of the y that was sent, and a direction: what the server expects of the fake clients."""
    return Reply(y, c.f_x(y, ALL))


class FakeClients:
    """Client i has 2i+1 lower rows and one upper row."""

    def __init__(self, count: int) -> None:
        self.count, self.capacity = count, ClientSize(2 * count - 1, 1)

    def size(self, client: int) -> ClientSize:
        return ClientSize(2 * client + 1, 1)

    def load(self, client: int) -> ClientData:
        return ClientData(*(Part(np.zeros((rows, 1), np.float32)) for rows in self.size(client)))


class FakeEngine:
    """x and y have p and q components, and the clients answer by `replies`; calls are kept."""

    def __init__(self, count: int, p: int, q: int, replies: Callable[[Call], Iterable[Replies]]) -> None:
        self.problem = Problem(jnp.zeros(p), jnp.zeros(q), lambda x, y, b: jnp.sum(y), lambda x, y, b: jnp.sum(x))
        self.clients = FakeClients(count)
        self.capabilities = Capabilities()
        self.calls: list[Call] = []
        self._replies = replies

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        yield from self._replies(call)

    def close(self) -> None:
        pass


class Watching:
    """An engine that keeps the calls on their way."""

    def __init__(self, engine: Engine) -> None:
        self.problem, self.clients, self._engine = engine.problem, engine.clients, engine
        self.capabilities = engine.capabilities
        self.calls: list[Call] = []

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        yield from self._engine.replies(call)

    def close(self) -> None:
        self._engine.close()
