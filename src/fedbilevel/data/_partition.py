"""Splitting a table of labelled rows across clients, and each client's rows into its two parts.

A kind of partition is one function and one line of `KINDS`. Most deal out the table: every row goes to exactly
one part of exactly one client (`classes` leaves rows over, so that all clients have equally many). The others draw
the rows of one client when it is asked for, so that a million clients cost no more than the ones that are used.
Whatever the kind, no part is empty.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError, UnknownName
from ..rng import generator
from ._clients import ClientData, ClientSize, LazyClients, Part
from ._dataset import Dataset

Rows = npt.NDArray[np.intp]
Labels = npt.NDArray[np.integer]


@dataclass(frozen=True, eq=False)
class Partition:
    """The row numbers of every client's lower and upper part."""

    lower: list[Rows]
    upper: list[Rows]

    @property
    def clients(self) -> int:
        return len(self.lower)

    def size(self, client: int) -> ClientSize:
        return ClientSize(len(self.lower[client]), len(self.upper[client]))

    def rows(self, client: int) -> Rows:
        """All rows of a client, each once."""
        lower, upper = self.lower[client], self.upper[client]
        return lower if lower is upper else np.concatenate([lower, upper])

    def joined(self) -> Partition:
        """The partition in which both parts of a client have all of its rows."""
        rows = [self.rows(client) for client in range(self.clients)]
        return Partition(rows, rows)


@dataclass(frozen=True, eq=False)
class Drawn:
    """Row numbers that `draw(client)` makes anew whenever a client is asked for: its lower part, then its upper.

    Nothing is kept for a client. All clients have the same number of rows, and two clients may share rows.
    """

    clients: int
    each: ClientSize
    draw: Callable[[int], Rows]

    def size(self, client: int) -> ClientSize:
        return self.each

    def rows(self, client: int) -> Rows:
        return self.draw(client)


class Options(NamedTuple):
    """The options of the kinds of partition."""

    alpha: float
    shards_per_client: int
    rows_per_client: int
    classes_per_client: int = 2


Deal = Callable[[npt.NDArray[np.integer], int, np.random.Generator, Options], list[Rows]]
Draw = Callable[[list[Rows], np.random.Generator, Options], Rows]


def iid(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Rows dealt at random, as evenly as the count allows."""
    return np.array_split(g.permutation(len(targets)), clients)


def shards(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Rows sorted by label and cut into equal shards; every client gets `shards_per_client` at random."""
    pieces = np.array_split(np.argsort(targets, kind="stable"), clients * o.shards_per_client)
    dealt = g.permutation(len(pieces)).reshape(clients, o.shards_per_client)
    return [np.concatenate([pieces[i] for i in own]) for own in dealt]


def by_classes(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Every client gets `classes_per_client` classes, and equally many rows of each; some rows may be left over.

    Clients get classes in turn, from one random order of the classes after another, so that every class has about
    as many clients. A class that the client has already is left to the next client.
    """
    labels, k = np.unique(targets), o.classes_per_client
    if k > len(labels):
        raise SettingsError(f"classes_per_client={k} is too large: the data have {len(labels)} classes")
    waiting: list[int] = []
    own: list[list[int]] = []
    for _ in range(clients):
        mine: list[int] = []
        while len(mine) < k:
            waiting += [] if set(waiting) - set(mine) else g.permutation(labels).tolist()
            mine.append(next(label for label in waiting if label not in mine))
            waiting.remove(mine[-1])
        own.append(mine)
    rows = {label: g.permutation(np.flatnonzero(targets == label)) for label in labels.tolist()}
    holders = {label: sum(label in mine for mine in own) for label in rows}
    each = min(len(rows[label]) // count for label, count in holders.items() if count)
    if each * k < 2:
        raise SettingsError(f"clients={clients} is too large: a client would have {each} rows a class; use fewer")
    given = dict.fromkeys(rows, 0)
    dealt = []
    for mine in own:
        dealt.append(np.concatenate([rows[label][given[label] : given[label] + each] for label in mine]))
        given |= {label: given[label] + each for label in mine}
    return dealt


def own_tests(targets: Labels, own: Sequence[Labels], seed: int) -> list[Rows]:
    """Test rows for every client, dealt so that its labels are in the shares of its training rows.

    targets   the labels of all test rows
    own       the labels of the training rows of every client

    Every test row goes to at most one client, unless a client would have none: it then shares one of its labels.
    """
    g = generator(seed, "partition", "test")
    dealt: list[list[Rows]] = [[] for _ in own]
    for label in np.unique(targets).tolist():
        counts = np.asarray([np.count_nonzero(labels == label) for labels in own])
        if counts.sum():
            rows = g.permutation(np.flatnonzero(targets == label))
            cuts = (np.cumsum(counts)[:-1] * len(rows) // counts.sum()).astype(np.intp)
            for pieces, piece in zip(dealt, np.split(rows, cuts), strict=True):
                pieces.append(piece)
    parts = [np.concatenate(pieces) if pieces else np.zeros(0, np.intp) for pieces in dealt]
    for client, labels in enumerate(own):
        if len(parts[client]) == 0:
            shared = np.flatnonzero(np.isin(targets, labels))
            if len(shared) == 0:
                raise SettingsError(f"client {client} has no test rows: no test row has one of its labels")
            parts[client] = g.choice(shared, 1)
    return parts


def dirichlet(targets: npt.NDArray[np.integer], clients: int, g: np.random.Generator, o: Options) -> list[Rows]:
    """Every class is cut among the clients in proportions drawn from Dirichlet(alpha, ..., alpha)."""
    own: list[list[Rows]] = [[] for _ in range(clients)]
    for label in np.unique(targets):
        rows = g.permutation(np.flatnonzero(targets == label))
        cuts = (np.cumsum(_shares(clients, g, o)[:-1]) * len(rows)).astype(np.intp)
        for pieces, piece in zip(own, np.split(rows, cuts), strict=True):
            pieces.append(piece)
    return [np.concatenate(pieces) for pieces in own]


def drawn(labels: list[Rows], g: np.random.Generator, o: Options) -> Rows:
    """One client's `rows_per_client` rows, each once: labels in shares drawn from Dirichlet(alpha, ..., alpha).

    `labels` has the rows of every label. If a label has fewer rows than its share, rows of any label fill the gap.
    """
    counts = g.multinomial(o.rows_per_client, _shares(len(labels), g, o))
    counts = np.minimum(counts, [len(rows) for rows in labels])
    pairs = zip(labels, counts.tolist(), strict=True)
    own = np.concatenate([rows[g.choice(len(rows), n, replace=False)] for rows, n in pairs if n])
    if len(own) < o.rows_per_client:
        others = np.setdiff1d(np.concatenate(labels), own)
        own = np.append(own, g.choice(others, o.rows_per_client - len(own), replace=False))
    return g.permutation(own)


def _shares(count: int, g: np.random.Generator, o: Options) -> npt.NDArray[np.float64]:
    shares = g.dirichlet(np.full(count, o.alpha))
    if not abs(shares.sum() - 1) < 1e-6:  # overflow, or not a number
        raise SettingsError(f"alpha={o.alpha} is too extreme to draw from; use one between 0.001 and 1e6")
    return shares


class Kind(NamedTuple):
    """How clients get their rows, and the default share of rows for the lower loss.

    deal   gives every client its rows at once, or
    draw   gives one client its rows, when it is asked for
    """

    train_share: float
    deal: Deal | None = None
    draw: Draw | None = None


KINDS = {
    "iid": Kind(0.5, deal=iid),
    "shards": Kind(0.8, deal=shards),
    "classes": Kind(0.8, deal=by_classes),
    "dirichlet": Kind(0.8, deal=dirichlet),
    "drawn": Kind(0.8, draw=drawn),
}


def partition(
    kind: str,
    targets: npt.ArrayLike,
    clients: int,
    *,
    seed: int,
    alpha: float = 0.5,
    shards_per_client: int = 2,
    rows_per_client: int = 100,
    classes_per_client: int = 2,
    train_share: float | None = None,
) -> Partition | Drawn:
    """Split the rows of `targets` across `clients`; `train_share` of a client's rows is its lower part."""
    if kind not in KINDS:
        raise UnknownName("partition", kind, KINDS)
    labels = np.asarray(targets)
    if not (alpha > 0 and math.isfinite(alpha)):
        raise SettingsError(f"alpha={alpha} is not a positive number; use e.g. 0.5 (smaller is more unequal)")
    if shards_per_client < 1:
        raise SettingsError(f"shards_per_client={shards_per_client} is below 1; the paper uses 2")
    share = KINDS[kind].train_share if train_share is None else train_share
    if not 0 < share < 1:
        raise SettingsError(f"train_share={share} is not between 0 and 1; remove it, or use e.g. 0.8")
    options = Options(alpha, shards_per_client, rows_per_client, classes_per_client)
    _, deal, draw = KINDS[kind]
    if draw is not None:
        return _drawn(draw, kind, labels, clients, seed, share, options)
    assert deal is not None
    return _dealt(deal, kind, labels, clients, seed, share, options)


def _dealt(
    deal: Deal, kind: str, labels: npt.NDArray[np.integer], clients: int, seed: int, share: float, o: Options
) -> Partition:
    if not 1 <= clients <= len(labels) // 2:
        raise SettingsError(
            f"clients={clients} does not fit {len(labels)} rows: a client needs one row for each of its two "
            f"parts; use 1 to {len(labels) // 2} clients, or the partition drawn, whose clients may share rows"
        )
    g = generator(seed, "partition", kind)
    own = _fill([g.permutation(rows) for rows in deal(labels, clients, g, o)])
    cuts = [_cut(len(rows), share) for rows in own]
    return Partition(
        lower=[rows[:cut] for rows, cut in zip(own, cuts, strict=True)],
        upper=[rows[cut:] for rows, cut in zip(own, cuts, strict=True)],
    )


def _drawn(
    draw: Draw, kind: str, labels: npt.NDArray[np.integer], clients: int, seed: int, share: float, o: Options
) -> Drawn:
    if clients < 1:
        raise SettingsError(f"clients={clients} is below 1; use as many as you like")
    if not 2 <= o.rows_per_client <= len(labels):
        raise SettingsError(
            f"rows_per_client={o.rows_per_client} does not fit {len(labels)} rows: a client needs one row for "
            f"each of its two parts and has none twice; use 2 to {len(labels)}"
        )
    order = np.argsort(labels, kind="stable")
    by_label = np.split(order, np.flatnonzero(np.diff(labels[order])) + 1)
    lower = _cut(o.rows_per_client, share)
    made = Drawn(
        clients,
        ClientSize(lower, o.rows_per_client - lower),
        lambda client: draw(by_label, generator(seed, "partition", kind, client), o),
    )
    made.rows(0)  # so that options that cannot be drawn raise here, and not in the middle of a run
    return made


def _cut(rows: int, share: float) -> int:
    """How many of a client's rows are its lower part: the share, with at least one row in each part."""
    return min(max(round(share * rows), 1), rows - 1)


def _fill(own: list[Rows]) -> list[Rows]:
    """Give every client at least two rows, each taken from the client that has most at that moment.

    There are at least two rows per client. So while a client has fewer, another has at least three, and this ends.
    """
    largest = [(-len(rows), client) for client, rows in enumerate(own)]
    heapq.heapify(largest)
    for client in range(len(own)):
        while len(own[client]) < 2:
            _, giver = largest[0]
            own[client], own[giver] = np.append(own[client], own[giver][-1]), own[giver][:-1]
            heapq.heapreplace(largest, (-len(own[giver]), giver))
    return own


def taken(dataset: Dataset, lower: Rows, upper: Rows) -> ClientData:
    """The training rows of a client."""
    return ClientData(*(Part(dataset.train_inputs[rows], dataset.train_targets[rows]) for rows in (lower, upper)))


@final
class PartitionedClients:
    """Clients that hold the training rows of a data set, as a partition deals them.

    A client's rows are taken from the table when it is first asked, and kept, so that a start is not delayed.

    test   the numbers of the test rows of every client, if clients have test rows of their own
    """

    def __init__(self, dataset: Dataset, partition: Partition, test: Sequence[Rows] | None = None) -> None:
        self._dataset, self._partition, self._test = dataset, partition, test
        self.test_rows = 0 if test is None else max(len(rows) for rows in test)
        self._loaded: dict[int, ClientData] = {}
        pairs = zip(partition.lower, partition.upper, strict=True)
        self._sizes = np.asarray([(len(lower), len(upper)) for lower, upper in pairs])
        self.capacity = ClientSize(*self._sizes.max(axis=0).tolist())

    @property
    def count(self) -> int:
        return len(self._sizes)

    def size(self, client: int) -> ClientSize:
        return ClientSize(*self._sizes[client].tolist())

    def load(self, client: int) -> ClientData:
        if client not in self._loaded:
            lower, upper = self._partition.lower[client], self._partition.upper[client]
            data = taken(self._dataset, lower, upper)
            if self._test is not None:
                rows, d = self._test[client], self._dataset
                data = data._replace(test=Part(d.test_inputs[rows], d.test_targets[rows]))
            self._loaded[client] = data
        return self._loaded[client]


def drawn_clients(dataset: Dataset, parts: Drawn) -> LazyClients:
    """Clients whose rows of a data set are drawn when they are asked for; only the table is kept."""

    def make(client: int) -> ClientData:
        return taken(dataset, *np.split(parts.rows(client), [parts.each.lower]))

    return LazyClients(parts.clients, parts.each, make, parts.size)
