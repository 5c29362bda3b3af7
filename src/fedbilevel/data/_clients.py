"""What the clients of a federation hold: two parts of data each, for the lower and for the upper loss.

A client may have test rows of its own beside them, on which the problem's metrics are measured.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import jax

from ..errors import SettingsError
from ._rows import numbers, rows_agree, shapes_agree
from ._torch import rows_of_torch

PyTree = Any


class Part(NamedTuple):
    """Rows of data: `inputs` and `targets` are arrays, or pytrees of arrays, whose first axis is the row."""

    inputs: PyTree
    targets: PyTree = None

    @property
    def rows(self) -> int:
        """The number of rows."""
        return int(jax.tree.leaves(self)[0].shape[0])


class ClientData(NamedTuple):
    """One client's data: `lower` has the rows of the lower loss, `upper` those of the upper loss.

    `test` has rows that no loss uses, for the client's own metrics; None if it has no such rows.
    """

    lower: Part
    upper: Part
    test: Part | None = None

    @property
    def parts(self) -> dict[str, Part]:
        """The parts that the client has, by name."""
        return {name: part for name, part in self._asdict().items() if part is not None}


def lower_only(lower: Part) -> ClientData:
    """The data of a client without upper rows, because the server has them (`Problem.server`).

    Every part of a client has a row, so its upper part is its first lower row, on which its upper loss is zero.
    """
    return ClientData(lower, jax.tree.map(lambda a: a[:1], lower))


class Clients(Protocol):
    """The registered clients. Data are loaded when asked for, so registering a client costs nothing.

    Clients with test rows of their own also have `test_rows`, the largest number of such rows of any client.
    """

    @property
    def count(self) -> int:
        """How many clients there are."""

    @property
    def capacity(self) -> ClientSize:
        """The largest number of rows of any client, for each part: engines pad to it."""

    def size(self, client: int) -> ClientSize:
        """The numbers of rows of a client."""

    def load(self, client: int) -> ClientData:
        """The rows of a client."""


class ClientSize(NamedTuple):
    """The number of rows a client has for each of the two losses."""

    lower: int
    upper: int


@dataclass(frozen=True)
class ListedClients:
    """Clients whose data are in memory, one `ClientData` each."""

    data: Sequence[ClientData]

    def __post_init__(self) -> None:
        if not self.data:
            raise SettingsError("a federation needs at least one client; the list of client data is empty")
        for i, data in enumerate(self.data):
            first = self.data[0].parts
            if data.parts.keys() != first.keys():
                raise SettingsError(
                    f"client {i} has the parts {', '.join(data.parts)}, and client 0 has {', '.join(first)}; "
                    "give test rows to all clients, or to none"
                )
            for name, part in data.parts.items():
                rows_agree(f"client {i}, {name}", part)
                if part.rows == 0:
                    raise SettingsError(f"client {i} has no {name} rows; give it some, or remove the client")
                shapes_agree(f"client {i}, {name}", part, first[name])

    @property
    def count(self) -> int:
        """How many clients there are."""
        return len(self.data)

    @cached_property
    def capacity(self) -> ClientSize:
        """The largest number of rows of any client, for each part."""
        sizes = [self.size(i) for i in range(self.count)]
        return ClientSize(max(s.lower for s in sizes), max(s.upper for s in sizes))

    @cached_property
    def test_rows(self) -> int:
        """The largest number of test rows of any client."""
        return max(0 if data.test is None else data.test.rows for data in self.data)

    def size(self, client: int) -> ClientSize:
        """The numbers of rows of a client."""
        return ClientSize(self.data[client].lower.rows, self.data[client].upper.rows)

    def load(self, client: int) -> ClientData:
        """The rows of a client."""
        return self.data[client]


@dataclass(frozen=True)
class LazyClients:
    """Clients whose data are made on demand by `make(client)`: a million of them cost nothing to register.

    `sizes(client)` returns how many rows `make` would give. Without it, data are made every round to count them.
    `test_rows` is the largest number of test rows of any client.
    """

    count: int
    capacity: ClientSize
    make: Callable[[int], ClientData]
    sizes: Callable[[int], ClientSize] | None = None
    test_rows: int = 0

    def size(self, client: int) -> ClientSize:
        """The numbers of rows of a client, by `sizes` or by making its data."""
        if self.sizes is not None:
            return self.sizes(client)
        data = self.load(client)
        return ClientSize(data.lower.rows, data.upper.rows)

    def load(self, client: int) -> ClientData:
        """Make the data of a client, and check that they fit."""
        data = self.make(client)
        limits = {**self.capacity._asdict(), "test": self.test_rows}
        if self.test_rows and data.test is None:
            raise SettingsError(f"client {client} has no test rows, and test_rows = {self.test_rows}; make some")
        for name, part in data.parts.items():
            most = limits[name]
            rows_agree(f"client {client}, {name}", part)
            if not 0 < part.rows <= most:
                raise SettingsError(
                    f"client {client}, {name}: {part.rows} rows, and the capacity of the clients is {most}; "
                    f"make 1 to {most} rows, or give another capacity"
                )
        return data


def test_rows(clients: Clients) -> int:
    """The largest number of test rows of any client; zero if clients have none."""
    return int(getattr(clients, "test_rows", 0))


def part_from(value: Any, where: str) -> Part:
    """Rows from whatever has them; raises with the name of the place if a loss cannot use them."""
    if value is None:
        raise SettingsError(f"{where}: there are no data; give inputs, or inputs and targets")
    value = rows_of_torch(value, where)
    pair = value if isinstance(value, tuple) else (value,)
    if len(pair) not in (1, 2):
        raise SettingsError(f"{where}: a tuple of {len(pair)}; give inputs, or a pair of inputs and targets")
    return Part(*(numbers(f"{where} {name}", v) for name, v in zip(Part._fields, pair, strict=False)))


def clients_from(parts: Sequence[tuple[Any, ...]]) -> ListedClients:
    """Clients from a sequence of (lower, upper) pairs, or of triples whose last part has test rows.

    Each of the parts is a `Part`, an (inputs, targets) pair, a single array or pytree of inputs, or a Dataset,
    Subset or DataLoader of PyTorch, which is read whole. What a loss cannot use is refused, by the client and the
    field: strings, gaps, other numbers of rows, other shapes.
    """

    def client(i: int, pair: Any) -> ClientData:
        if not isinstance(pair, tuple | list) or len(pair) not in (2, 3):
            what = f"a {type(pair).__name__}" + (f" of {len(pair)}" if isinstance(pair, tuple | list) else "")
            raise SettingsError(f"client {i}: {what}, where its two parts are needed; give a pair (lower, upper)")
        given = pair[:2] if pair[-1] is None and len(pair) == 3 else pair  # a `ClientData` without test rows
        names = ClientData._fields[: len(given)]
        return ClientData(*(part_from(own, f"client {i}, {name}") for name, own in zip(names, given, strict=True)))

    return ListedClients([client(i, pair) for i, pair in enumerate(parts)])
