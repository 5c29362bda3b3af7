"""The interface between the federation and what runs the clients.

An engine is given a `Call` and yields the cohort's replies. It draws the samples where the data are, counts
nothing, and knows no algorithm.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax import Array

from ..data.clients import ClientData, Clients, ClientSize, Part
from ..oracle import Arrays, Memory, Oracle, PartArrays
from ..problem import Problem
from ..steps import Descriptor, PerClient, Step, draw

PyTree = Any


class Held(NamedTuple):
    """A vector that clients keep: its version, and which of the cohort do not have it yet."""

    version: int
    value: Array
    missing: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """One round, as an engine sees it.

    `address` is where the samples of the round are drawn: (seed, kind, round).
    `arrays` are sent down and may change from call to call; `constants` (None, bool, int, str) choose the
    program; `own` has one value for each registered client. `attempt` counts how often they were asked before
    in the same round; a `local` call is work of the clients for themselves, without a message.
    """

    step: Step[Any, Any]
    address: tuple[int | str, ...]
    clients: tuple[int, ...]
    held: Mapping[str, Held] = field(default_factory=dict)
    arrays: Mapping[str, Any] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    own: Mapping[str, PerClient] = field(default_factory=dict)
    samples: Mapping[str, Descriptor] = field(default_factory=dict)
    attempt: int = 0
    local: bool = False

    def again(self, clients: tuple[int, ...], attempt: int) -> Call:
        """The same call to those clients only, who are sent again what they should hold."""
        held = {
            name: h._replace(missing=tuple(c for c in clients if c in h.missing)) for name, h in self.held.items()
        }
        return dataclasses.replace(self, clients=clients, held=held, attempt=attempt)

    @property
    def vectors(self) -> dict[str, Array]:
        """The held vectors by name."""
        return {name: held.value for name, held in self.held.items()}

    @property
    def before(self) -> dict[str, Array]:
        """The vectors, held or sent, that a field of the reply is named after: it is the vector's next value.

        What a client contributes to such a field is the difference to the vector.
        """
        given = {**self.arrays, **self.vectors}
        return {name: given[name] for name in self.step.reply if np.ndim(given.get(name, 0.0)) > 0}

    @property
    def program(self) -> tuple[Any, ...]:
        """What the compiled program of this call depends on, shapes aside."""
        return self.step, tuple(sorted(self.constants.items()))

    def __str__(self) -> str:
        return f"{self.step.name}, {self.address[1]} {self.address[2]}"


class Replies(NamedTuple):
    """Replies of some of the cohort, stacked along the first axis.

    failures  whose replies are no good, and why
    wire      the bytes of the messages up and down, headers and all, on an engine that sends any
    absent    who did not reply, and why
    delay     seconds that these replies took, if the engine leaves the deadline to the federation
    address   of the call that they answer, if the engine does not vouch for it
    injected  faults made on purpose, by client
    """

    clients: tuple[int, ...]
    reply: Any
    failures: Mapping[int, str] = {}
    wire: tuple[int, int] = (0, 0)
    absent: Mapping[int, str] = {}
    delay: float = 0.0
    address: tuple[int | str, ...] | None = None
    injected: Mapping[int, str] = {}

    def split(self, count: int) -> tuple[Replies, Replies]:
        """The first replies, so many of them, and the others."""
        if count >= len(self.clients):
            return self, self._replace(clients=(), reply=None)
        first, rest = slice(count), slice(count, None)
        return tuple(  # type: ignore[return-value]
            self._replace(clients=self.clients[part], reply=jax.tree.map(operator.itemgetter(part), self.reply))
            for part in (first, rest)
        )


class Engine(Protocol):
    """What runs client steps."""

    @property
    def problem(self) -> Problem: ...

    @property
    def clients(self) -> Clients: ...

    def replies(self, call: Call) -> Iterator[Replies]:
        """Run the step on every client of the cohort; yield replies in the order of the cohort."""

    def close(self) -> None:
        """Let go of data, and of processes; there are no more calls."""


def prepare(call: Call, client: int, size: ClientSize, capacity: ClientSize) -> dict[str, Any]:
    """Draw the rows of a call for one client, at the address (seed, kind, round, argument, client)."""
    return {
        name: draw(
            descriptor,
            (*call.address, name),
            client,
            getattr(size, descriptor.part),
            getattr(capacity, descriptor.part),
        )
        for name, descriptor in call.samples.items()
    }


def perform(
    problem: Problem,
    call: Call,
    vectors: dict[str, Array],
    arrays: Mapping[str, Array],
    own: Mapping[str, Array],
    draws: Mapping[str, Any],
    data: Arrays,
    memory: Memory | None,
) -> Any:
    """Run a step for one client. Pure: engines jit it, and batch it over clients."""
    oracle = Oracle(problem, vectors, data, memory)
    return call.step(oracle, **arrays, **call.constants, **own, **draws)


def pad(data: ClientData, capacity: ClientSize) -> Arrays:
    """Pad both parts to the capacity with copies of their first row, which get weight zero."""

    def fill(part: Part, rows: int) -> PartArrays:
        count = part.rows

        def grow(a: Any) -> Any:
            a = np.asarray(a)
            if count == rows:
                return a
            out = np.empty((rows, *a.shape[1:]), a.dtype)
            out[:count], out[count:] = a, a[:1]
            return out

        inputs, targets = jax.tree.map(grow, tuple(part))
        return PartArrays(inputs, targets, np.int32(count))

    return Arrays(fill(data.lower, capacity.lower), fill(data.upper, capacity.upper))
