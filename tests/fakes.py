"""An engine whose clients answer whatever a test wants, and a step for it that is never run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from fedbilevel.data import ClientSize
from fedbilevel.engines import Call, Replies
from fedbilevel.oracle import Oracle
from fedbilevel.problem import Problem
from fedbilevel.steps import X, Y, client_step


class Reply(NamedTuple):
    y: Y
    h: X | None


@client_step
def answer(c: Oracle, **arguments: Any) -> Reply:
    """Never run."""
    raise AssertionError


class FakeEngine:
    """x and y have p and q components, client i has 2i+1 lower rows and answers by `replies`; calls are kept."""

    def __init__(self, count: int, p: int, q: int, replies: Callable[[Call], Iterable[Replies]]) -> None:
        self.problem = Problem(np.zeros(p, "f4"), np.zeros(q, "f4"), lambda x, y, b: 0.0, lambda x, y, b: 0.0)
        self.clients: Any = SimpleNamespace(count=count, size=lambda c: ClientSize(2 * c + 1, 1))
        self.calls: list[Call] = []
        self._replies = replies

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        yield from self._replies(call)
