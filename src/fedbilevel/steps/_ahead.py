"""Rows that are drawn ahead, for many calls at once.

A draw has a part that is the same in every call, the weights of its rows and the steps that a client takes, and a
part that is drawn anew: the places of the rows, and the words that decide the choices of a random loss. Only the
second part is drawn here. It is what `draw` draws, bit for bit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from .. import rng
from ..native import as_numpy, permutations
from ..rng import Address, Kind, Root
from ._samples import (
    Chance,
    Chances,
    Descriptor,
    Draw,
    Epochs,
    Sample,
    Samples,
    Stream,
    draw,
    place_of,
    steps_of,
    weights_of_rows,
)


class Moving(NamedTuple):
    """The part of a draw that is drawn anew in every call."""

    index: Any
    words: Any


def still_part(drawn: Any) -> Any:
    """The part of a draw that is the same in every call, with None for the rest."""
    if isinstance(drawn, Stream):
        return drawn._replace(draws=still_part(drawn.draws))
    return drawn._replace(index=None, chance=None)


def draw_still(descriptor: Descriptor, client: int, rows: int, capacity: int) -> Any:
    """The part of a client's draw that is the same in every call, without drawing the other part."""
    own, longest = steps_of(descriptor, client, rows, capacity)
    weight = None if descriptor.size is None else weights_of_rows(descriptor, descriptor.size, own, longest, rows)
    if isinstance(descriptor, Sample):
        return Draw(None, None if weight is None else weight[0])
    return Stream(Draw(None, weight), np.arange(longest) < own)


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
    """The number of rows of clients in one part, by client, and the largest number of any registered client."""

    sizes: np.ndarray | Mapping[int, int]
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
    number: type[np.integer] = np.int32,
) -> Moving:
    """Draw what the clients of many calls would draw for an argument, one after the other.

    The places of rows are numbers of the type that is given.
    """
    root, kind, places, clients = calls
    if chances is None and isinstance(root, int) and as_numpy():
        return Moving(_indices(descriptor, root, kind, name, places, clients, rows, number), None)
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
    descriptor: Descriptor,
    root: int,
    kind: Kind,
    name: str,
    places: np.ndarray,
    clients: np.ndarray,
    rows: Rows,
    number: type[np.integer],
) -> np.ndarray:
    """The places of the rows of all draws, as `draw` has them."""
    size = descriptor.size
    assert size is not None
    keys = rng.keys(root, kind.value, places[:, None], name, clients).reshape(-1, 2)
    who = np.ravel(clients)
    alike: dict[tuple[int, int], list[int]] = {}
    longest = 0
    for client in np.unique(who).tolist():
        own = int(rows.sizes[client])
        taken, longest = steps_of(descriptor, client, own, rows.capacity)
        alike.setdefault((own, taken), []).append(client)
    made: Any = None
    for (count, taken), those in alike.items():
        whole = len(alike) == 1
        chosen: Any = slice(None) if whole else np.flatnonzero(np.isin(who, those))
        if isinstance(descriptor, Epochs):
            width = taken // descriptor.epochs * size  # the last minibatch of a pass may be short
            orders = permutations(keys[chosen], descriptor.epochs, count, width, number).reshape(-1, taken, size)
        else:
            once = place_of(descriptor) is not None
            orders = permutations(keys[chosen], 1 if once else taken, count, size, number)
        if whole and orders.shape[1] == longest:
            made = orders
            break
        if made is None:
            made = np.zeros((len(who), longest, size), number)
        made[chosen, :taken] = orders
    made = made.reshape(*clients.shape, *made.shape[1:])
    return made[:, :, 0] if isinstance(descriptor, Sample) else made
