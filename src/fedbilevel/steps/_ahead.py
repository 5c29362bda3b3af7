"""Rows that are drawn ahead, for many calls at once.

A draw has a part that is the same in every call, the weights of its rows and the steps that a client takes, and a
part that is drawn anew: the places of the rows, and the words that decide the choices of a random loss. Only the
second part is drawn here. It is what `draw` draws, bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .. import rng
from ..rng import Address, Kind, Root
from ._samples import Chance, Chances, Descriptor, Draw, Epochs, Sample, Samples, Stream, draw, place_of, steps_of


class Moving(NamedTuple):
    """The part of a draw that is drawn anew in every call."""

    index: Any
    words: Any


def still_part(drawn: Any) -> Any:
    """The part of a draw that is the same in every call, with None for the rest."""
    if isinstance(drawn, Stream):
        return drawn._replace(draws=still_part(drawn.draws))
    return drawn._replace(index=None, chance=None)


def moving_part(drawn: Any) -> Moving:
    """The part of a draw that is drawn anew in every call."""
    draws: Draw = drawn.draws if isinstance(drawn, Stream) else drawn
    return Moving(draws.index, None if draws.chance is None else draws.chance.words)


def whole(still: Any, moving: Moving, chances: Chances | None) -> Any:
    """A draw from its two parts."""
    if isinstance(still, Stream):
        return still._replace(draws=whole(still.draws, moving, chances))
    chance = None if moving.words is None else Chance(moving.words, chances == "derivative")
    return still._replace(index=moving.index, chance=chance)


class Rows(NamedTuple):
    """The number of rows of each registered client in one part, and the largest of these numbers."""

    sizes: np.ndarray
    capacity: int


class Calls(NamedTuple):
    """Calls for which an argument is drawn: their places, and with a row for each call its clients."""

    root: Root
    kind: Kind
    places: np.ndarray
    clients: np.ndarray


def draw_ahead(
    descriptor: Descriptor,
    name: str,
    calls: Calls,
    rows: Rows,
    chances: Chances | None,
) -> Moving:
    """Draw what the clients of many calls would draw for an argument, one after the other."""
    root, kind, places, clients = calls
    if chances is None and isinstance(root, int) and _as_numpy():
        return Moving(_indices(descriptor, root, kind, name, places, clients, rows), None)
    drawn = []
    for place, cohort in zip(places.tolist(), clients, strict=True):
        own, address = descriptor, Address(root, kind, place)
        if isinstance(own, Samples) and own.of is not None:
            own = replace(own, of=place)
        drawn += [
            moving_part(draw(own, address, name, int(c), int(rows.sizes[c]), rows.capacity, chances))
            for c in cohort
        ]
    return Moving(*(_stacked(leaves, clients.shape) for leaves in zip(*drawn, strict=True)))


def _stacked(leaves: Sequence[Any], lead: tuple[int, ...]) -> Any:
    return None if leaves[0] is None else np.stack(leaves).reshape(*lead, *leaves[0].shape)


def _indices(
    descriptor: Descriptor, root: int, kind: Kind, name: str, places: np.ndarray, clients: np.ndarray, rows: Rows
) -> np.ndarray:
    """The places of the rows of all draws, as `draw` has them."""
    size = descriptor.size
    assert size is not None
    keys = rng.keys(root, kind.value, places[:, None], name, clients).reshape(-1, 2)
    who = np.ravel(clients)
    sizes = rows.sizes.tolist()
    steps = [steps_of(descriptor, client, own, rows.capacity) for client, own in enumerate(sizes)]
    made = np.zeros((len(who), steps[0][1], size), np.int32)
    alike: dict[tuple[int, int], list[int]] = {}
    for client, own in enumerate(sizes):
        alike.setdefault((own, steps[client][0]), []).append(client)
    for (count, taken), those in alike.items():
        chosen: Any = slice(None) if len(alike) == 1 else np.flatnonzero(np.isin(who, those))
        if isinstance(descriptor, Epochs):
            orders = _permutations(keys[chosen], descriptor.epochs, count)
            width = taken // descriptor.epochs * size
            if width > count:  # the last minibatch of a pass is short
                orders = np.pad(orders, ((0, 0), (0, 0), (0, width - count)))
            made[chosen, :taken] = orders.reshape(-1, taken, size)
        else:
            once = place_of(descriptor) is not None
            orders = _permutations(keys[chosen], 1 if once else taken, count)[:, :, :size]
            made[chosen, :taken, : orders.shape[2]] = orders
    made = made.reshape(*clients.shape, *made.shape[1:])
    return made[:, :, 0] if isinstance(descriptor, Sample) else made


def _permutations(keys: np.ndarray, count: int, rows: int) -> np.ndarray:
    """For each key, the first permutations of so many rows that a generator draws there."""
    start = np.empty((count, rows), np.int64)
    start[:] = np.arange(rows)
    made, rekeyed = np.empty((len(keys), count, rows), np.int64), rng.Rekeyed()
    turn, permuted = rekeyed.turn, rekeyed.generator.permuted
    for first, second, orders in zip(keys[:, 0].tolist(), keys[:, 1].tolist(), made, strict=True):
        turn((first, second))
        permuted(start, axis=1, out=orders)
    return made


@lru_cache(maxsize=1)
def _as_numpy() -> bool:
    """Whether NumPy still draws in the way that is taken for granted here. If not, it is asked for every draw."""
    seed, places = 2**40, np.arange(3)
    made = _permutations(rng.keys(seed, "round", places, "u", 3), 2, 50)
    generators = [rng.generator(seed, "round", int(place), "u", 3) for place in places]
    return np.array_equal(made, [[g.permutation(50) for _ in range(2)] for g in generators])
