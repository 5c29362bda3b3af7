"""An engine whose clients answer whatever a test wants, and a step for it that only tells the shapes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from fedbilevel.data import ClientSize
from fedbilevel.engines import Call, Capabilities, Replies
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Problem
from fedbilevel.steps import Draw, Next, X, Y, client_step


class Reply(NamedTuple):
    y: Next[Y]
    h: X


@client_step
def answer(c: Oracle, y: Array) -> Reply:
    """Run abstractly only, to tell the shapes; the engine below answers in its place."""
    everything = Draw(None, None)
    return Reply(c.g_y(y, everything), c.f_x(y, everything))


def no_loss(x: Any, y: Any, batch: Any) -> Array:
    return jnp.zeros(())


class FakeEngine:
    """x and y have p and q components, client i has 2i+1 lower rows and answers by `replies`; calls are kept."""

    capabilities = Capabilities()

    def __init__(self, count: int, p: int, q: int, replies: Callable[[Call], Iterable[Replies]]) -> None:
        self.problem = Problem(np.zeros(p, "f4"), np.zeros(q, "f4"), no_loss, no_loss)
        self.clients: Any = SimpleNamespace(count=count, size=lambda c: ClientSize(2 * c + 1, 1))
        self.calls: list[Call] = []
        self._replies = replies

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        yield from self._replies(call)

    def close(self) -> None: ...
