"""Splitting a table of labelled rows across clients, and each client's rows into its two parts.

A kind of partition is one function and one line of `KINDS`. Whatever the kind, every row goes to exactly
one part of exactly one client, and no part is empty.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError, UnknownName
from ..rng import generator
from .clients import ClientData, ClientSize, Part
from .sources import Dataset

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Partition:
    """The row numbers of every client's lower and upper part."""

    lower: list[Rows]
    upper: list[Rows]

    @property
    def clients(self) -> int:
        return len(self.lower)

    def rows(self, client: int) -> Rows:
        return np.concatenate([self.lower[client], self.upper[client]])


class Options(NamedTuple):
    """What a kind of partition may be told."""

    alpha: float
    shards_per_client: int


Split = Callable[[npt.NDArray[np.integer], int, np.random.Generator, Options], list[Rows]]


def iid(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Rows dealt at random, as evenly as the count allows."""
    return np.array_split(g.permutation(len(targets)), clients)


def shards(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Rows sorted by label and cut into equal shards; every client gets `shards_per_client` at random."""
    pieces = np.array_split(np.argsort(targets, kind="stable"), clients * o.shards_per_client)
    dealt = g.permutation(len(pieces)).reshape(clients, o.shards_per_client)
    return [np.concatenate([pieces[i] for i in own]) for own in dealt]


def dirichlet(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Every class is cut among the clients in proportions drawn from Dirichlet(alpha, ..., alpha)."""
    own: list[list[Rows]] = [[] for _ in range(clients)]
    for label in np.unique(targets):
        rows = g.permutation(np.flatnonzero(targets == label))
        shares = g.dirichlet(np.full(clients, o.alpha))
        if not abs(shares.sum() - 1) < 1e-6:  # overflow, or not a number
            raise SettingsError(f"alpha={o.alpha} is too extreme to draw from; use one between 0.001 and 1e6")
        cuts = (np.cumsum(shares[:-1]) * len(rows)).astype(np.intp)
        for pieces, piece in zip(own, np.split(rows, cuts), strict=True):
            pieces.append(piece)
    return [np.concatenate(pieces) for pieces in own]


class Kind(NamedTuple):
    """A way to split, and the share of a client's rows that is for the lower loss unless told otherwise."""

    split: Split
    train_share: float


KINDS = {"iid": Kind(iid, 0.5), "shards": Kind(shards, 0.8), "dirichlet": Kind(dirichlet, 0.8)}


def partition(
    kind: str,
    targets: npt.ArrayLike,
    clients: int,
    *,
    seed: int,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    train_share: float | None = None,
) -> Partition:
    """Split the rows of `targets` across `clients`; `train_share` of a client's rows is its lower part."""
    if kind not in KINDS:
        raise UnknownName("partition", kind, KINDS)
    labels = np.asarray(targets)
    if not 1 <= clients <= len(labels) // 2:
        raise SettingsError(
            f"clients={clients} does not fit {len(labels)} rows: a client needs one row for each of its two "
            f"parts; use 1 to {len(labels) // 2} clients"
        )
    if not (alpha > 0 and math.isfinite(alpha)):
        raise SettingsError(f"alpha={alpha} is not a positive number; use e.g. 0.5 (smaller is more unequal)")
    if shards_per_client < 1:
        raise SettingsError(f"shards_per_client={shards_per_client} is below 1; the paper uses 2")
    share = KINDS[kind].train_share if train_share is None else train_share
    if not 0 < share < 1:
        raise SettingsError(f"train_share={share} is not between 0 and 1; leave it out or use e.g. 0.8")

    g = generator(seed, "partition", kind)
    own = KINDS[kind].split(labels, clients, g, Options(alpha, shards_per_client))
    own = _fill([g.permutation(rows) for rows in own])
    cuts = [min(max(round(share * len(rows)), 1), len(rows) - 1) for rows in own]
    return Partition(
        lower=[rows[:cut] for rows, cut in zip(own, cuts, strict=True)],
        upper=[rows[cut:] for rows, cut in zip(own, cuts, strict=True)],
    )


def _fill(own: list[Rows]) -> list[Rows]:
    """Give every client at least two rows, each taken from the client that has most at that moment.

    There are two rows a client or more, so while a client has fewer, another has three: it always ends.
    """
    largest = [(-len(rows), client) for client, rows in enumerate(own)]
    heapq.heapify(largest)
    for client in range(len(own)):
        while len(own[client]) < 2:
            _, giver = largest[0]
            own[client], own[giver] = np.append(own[client], own[giver][-1]), own[giver][:-1]
            heapq.heapreplace(largest, (-len(own[giver]), giver))
    return own


@final
class PartitionedClients:
    """Clients that hold the training rows of a data set, as a partition deals them.

    The table is put in the clients' order once, so what `load` gives are views.
    """

    def __init__(self, dataset: Dataset, partition: Partition) -> None:
        parts = [rows for pair in zip(partition.lower, partition.upper, strict=True) for rows in pair]
        order = np.concatenate(parts)
        self._inputs, self._targets = dataset.train_inputs[order], dataset.train_targets[order]
        self._edges = [0, *np.cumsum([len(rows) for rows in parts]).tolist()]
        self._sizes = np.diff(self._edges).reshape(-1, 2)
        self.capacity = ClientSize(*self._sizes.max(axis=0).tolist())

    @property
    def count(self) -> int:
        return len(self._sizes)

    def size(self, client: int) -> ClientSize:
        return ClientSize(*self._sizes[client].tolist())

    def load(self, client: int) -> ClientData:
        a, b, c = self._edges[2 * client : 2 * client + 3]
        return ClientData(
            lower=Part(self._inputs[a:b], self._targets[a:b]),
            upper=Part(self._inputs[b:c], self._targets[b:c]),
        )
