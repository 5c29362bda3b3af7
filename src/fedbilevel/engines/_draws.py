"""The rows that the clients of a chunk draw, call after call.

A draw has a part that is the same in every call, which is put on the devices once. The other part, the places of
the rows, is drawn anew at the address of each call. Most methods draw alike in every outer iteration. So the rows
of an argument are drawn at once for all calls of a cohort in which the cohort before it has drawn them. This is
only a guess of what will be asked for: a call gets the rows of its address, whether they were drawn ahead or not.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from ..data import Clients, ClientSize
from ..problem import BilevelProblem
from ..rng import Kind
from ..steps import (
    Calls,
    Descriptor,
    Moving,
    PerClient,
    Rows,
    Samples,
    Stream,
    draw_ahead,
    draw_still,
    place_of,
    steps_of,
    whole,
)
from ._call import Call
from ._groups import Group

STILL = 64  # the most draws whose still part stays on the devices
AHEAD = 2**24  # the most bytes of rows that are drawn ahead for an argument
CALLS = 1024  # the most calls of a cohort that are remembered for an argument


@dataclass
class _Series:
    """The draws of one argument.

    drawn     when the cohort was drawn that asks for them now, as a number of rounds
    before    when the cohort before it asked for them, in calls since it was drawn
    now       the same for this cohort so far
    whose     the root of the addresses and the clients that the rows of `ahead` are for
    ahead     rows by the place of the call
    """

    drawn: int = -1
    before: tuple[int, ...] = ()
    now: dict[int, None] = field(default_factory=dict)
    whose: Any = None
    ahead: dict[int, Moving] = field(default_factory=dict)


class Draws:
    """Draws rows for the clients of a chunk.

    spread   puts arrays with a row for each client on the devices, where they stay
    send     hands over arrays with a row for each client that are used once
    """

    def __init__(
        self,
        problem: BilevelProblem,
        clients: Clients,
        spread: Callable[[Any], Any],
        send: Callable[[Any], Any],
    ) -> None:
        self._problem, self._clients, self._spread, self._send = problem, clients, spread, send
        self._chunk: tuple[int, ...] = ()  # the last one, and the numbers of rows of its clients
        self._sizes: list[ClientSize] = []
        self._rows: dict[str, tuple[int, ...]] = {}
        self._still: dict[Any, Any] = {}
        self._series: dict[Any, _Series] = {}

    def sizes(self, chunk: tuple[int, ...]) -> list[ClientSize]:
        """The numbers of rows of the chunk's clients. Those of the last chunk are known."""
        if self._chunk != chunk:
            self._chunk, self._sizes = chunk, [self._clients.size(client) for client in chunk]
            self._rows = dict(zip(ClientSize._fields, zip(*self._sizes, strict=True), strict=True))
        return self._sizes

    def of(self, call: Call, chunk: tuple[int, ...], group: Group | None = None) -> dict[str, Any]:
        """The draws of the chunk's clients, or of a group of them, by argument.

        In a measurement the losses are not random.
        """
        if not call.samples:
            return {}
        chances = None if call.kind is Kind.PROBE else self._problem.chances
        self.sizes(chunk)
        made = {}
        for name, descriptor in call.samples.items():
            kind = _kind(descriptor)
            made[name] = self._still_part(kind, descriptor, chunk, group)
            if descriptor.size is not None or chances is not None:
                moving = self._moving_part(call, name, kind, descriptor, chunk)
                if group is not None:
                    moving = _of_group(moving, chunk, group, made[name])
                made[name] = whole(made[name], self._send(moving), chances)
        return made

    def clear(self) -> None:
        """Forget everything."""
        self._still.clear()
        self._series.clear()

    def _still_part(self, kind: Any, descriptor: Descriptor, chunk: tuple[int, ...], group: Group | None) -> Any:
        """What is the same in every call. Clients with as many rows and steps share it, whoever they are."""
        clients, capacity, sizes = chunk, self._clients.capacity, self._rows[descriptor.part]
        if group is not None:
            rows = dict(zip(chunk, sizes, strict=True))
            clients, capacity = group.clients, group.rows
            sizes = tuple(rows[client] for client in clients)
        most = getattr(capacity, descriptor.part)
        counted = isinstance(getattr(descriptor, "count", None), PerClient)
        key = kind, sizes, most, clients if counted else None
        if key not in self._still:
            if len(self._still) == STILL:
                self._still.clear()
            drawn = [draw_still(descriptor, c, own, most) for c, own in zip(clients, sizes, strict=True)]
            self._still[key] = self._spread(jax.tree.map(lambda *leaves: np.stack(leaves), *drawn))
        return self._still[key]

    def _moving_part(
        self, call: Call, name: str, kind: Any, descriptor: Descriptor, chunk: tuple[int, ...]
    ) -> Moving:
        """What is drawn anew, at the place of the call or of the earlier round whose rows are taken again."""
        root, earlier = call.address.root, place_of(descriptor)
        place = call.address.place if earlier is None else earlier
        series = self._series.setdefault((name, kind, call.kind), _Series())
        if series.drawn != call.drawn:
            series.drawn, series.before, series.now = call.drawn, tuple(series.now), {}
        if series.whose != (root, chunk):
            series.whose, series.ahead = (root, chunk), {}
        if len(series.now) < CALLS:
            series.now[place - call.drawn] = None
        if place not in series.ahead:
            places = [place]
            if len(chunk) >= len(call.clients):  # the chunks of a larger cohort take turns
                places += [call.drawn + since for since in series.before if since > place - call.drawn]
            series.ahead = self._drawn(call, name, descriptor, chunk, places)
        return series.ahead[place]

    def _drawn(
        self, call: Call, name: str, descriptor: Descriptor, chunk: tuple[int, ...], places: list[int]
    ) -> dict[int, Moving]:
        """The rows of an argument at the first places, as many as may be drawn ahead."""
        root, chances = call.address.root, None if call.kind is Kind.PROBE else self._problem.chances
        assert isinstance(root, int | bytes)  # keys of single draws are for clients that are elsewhere
        sizes = self._rows[descriptor.part]
        rows = Rows(dict(zip(chunk, sizes, strict=True)), getattr(self._clients.capacity, descriptor.part))

        if isinstance(root, bytes) or chances is not None:  # these are drawn one by one, so there is no gain
            places = places[:1]
        size, longest = descriptor.size or 1, max(steps_of(descriptor, chunk[0], sizes[0], rows.capacity))
        places = places[: max(1, AHEAD // (4 * len(chunk) * size * longest))]
        calls = Calls(root, call.kind, np.asarray(places), np.tile(np.asarray(chunk), (len(places), 1)))
        drawn = draw_ahead(descriptor, name, calls, rows, chances)
        return {place: Moving(*(None if a is None else a[i] for a in drawn)) for i, place in enumerate(places)}


def _of_group(moving: Moving, chunk: tuple[int, ...], group: Group, still: Any) -> Moving:
    """The rows of a group's clients. Its streams end with the longest that its clients may have."""
    place = dict(zip(chunk, range(len(chunk)), strict=True))
    own = [place[client] for client in group.clients]
    index = moving.index[own]
    return Moving(index[:, : still.active.shape[1]] if isinstance(still, Stream) else index, None)


def _kind(descriptor: Descriptor) -> Any:
    """What draws that are alike have in common: whether rows are taken again matters, but not of which round."""
    if not isinstance(descriptor, Samples):
        return descriptor
    count = descriptor.count
    steps = tuple(np.asarray(count.values).tolist()) if isinstance(count, PerClient) else count
    return descriptor.part, descriptor.size, steps, descriptor.of is not None
