"""What the clients of a federation hold: two parts of data each, for the lower and for the upper loss."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np

from ..errors import SettingsError

PyTree = Any


class Part(NamedTuple):
    """Rows of data: `inputs` and `targets` are arrays, or pytrees of arrays, whose first axis is the row."""

    inputs: PyTree
    targets: PyTree = None

    @property
    def rows(self) -> int:
        return int(jax.tree.leaves(self)[0].shape[0])


class ClientData(NamedTuple):
    """One client's data: `lower` has the rows of the lower loss, `upper` those of the upper loss."""

    lower: Part
    upper: Part


class Clients(Protocol):
    """The registered clients. Data are loaded when asked for, so registering a client costs nothing."""

    @property
    def count(self) -> int: ...

    @property
    def capacity(self) -> ClientSize:
        """The largest number of rows of any client, for each part: engines pad to it."""

    def size(self, client: int) -> ClientSize: ...

    def load(self, client: int) -> ClientData: ...


class ClientSize(NamedTuple):
    """The number of rows a client has for each part."""

    lower: int
    upper: int


@dataclass(frozen=True)
class ListedClients:
    """Clients whose data are in memory, one `ClientData` each."""

    data: Sequence[ClientData]

    def __post_init__(self) -> None:
        if not self.data:
            raise SettingsError("a federation needs at least one client; the list of client data is empty")
        for i in range(self.count):
            for part, rows in self.size(i)._asdict().items():
                if rows == 0:
                    raise SettingsError(f"client {i} has no {part} rows; give it some, or remove the client")

    @property
    def count(self) -> int:
        return len(self.data)

    @cached_property
    def capacity(self) -> ClientSize:
        sizes = [self.size(i) for i in range(self.count)]
        return ClientSize(max(s.lower for s in sizes), max(s.upper for s in sizes))

    def size(self, client: int) -> ClientSize:
        return ClientSize(self.data[client].lower.rows, self.data[client].upper.rows)

    def load(self, client: int) -> ClientData:
        return self.data[client]


@dataclass(frozen=True)
class LazyClients:
    """Clients whose data are made on demand by `make(client)`: a million of them cost nothing to register.

    `sizes(client)` returns how many rows `make` would give. Without it, data are made every round to count them.
    """

    count: int
    capacity: ClientSize
    make: Callable[[int], ClientData]
    sizes: Callable[[int], ClientSize] | None = None

    def size(self, client: int) -> ClientSize:
        if self.sizes is not None:
            return self.sizes(client)
        data = self.load(client)
        return ClientSize(data.lower.rows, data.upper.rows)

    def load(self, client: int) -> ClientData:
        return self.make(client)


def clients_from(parts: Sequence[tuple[Any, Any]]) -> ListedClients:
    """Clients from a sequence of (lower, upper) pairs.

    Each of the two is a `Part`, an (inputs, targets) pair, or a single array or pytree of inputs.
    """

    def part(value: Any) -> Part:
        pair = value if isinstance(value, tuple) else (value,)
        return Part(*(jax.tree.map(np.asarray, v) for v in pair))

    return ListedClients([ClientData(part(lower), part(upper)) for lower, upper in parts])
