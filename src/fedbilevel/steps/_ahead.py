"""Rows that are drawn ahead, for many calls at once.

A draw has a part that is the same in every call, the weights of its rows and the steps that a client takes, and a
part that is drawn anew: the places of the rows, and the words that decide the choices of a random loss. Only the
second part is drawn here. It is what `draw` draws, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np

from ..rng import Address
from ._samples import Chance, Chances, Descriptor, Draw, Epochs, Sample, Stream, draw


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


def draw_ahead(
    descriptor: Descriptor,
    name: str,
    addresses: list[Address],
    clients: np.ndarray,
    rows: Rows,
    chances: Chances | None,
) -> Moving:
    """Draw for many calls. Row k of `clients` has the clients of the call at the k-th address."""
    drawn = [
        [
            moving_part(draw(descriptor, address, name, int(c), int(rows.sizes[c]), rows.capacity, chances))
            for c in cohort
        ]
        for address, cohort in zip(addresses, clients, strict=True)
    ]
    return jax.tree.map(lambda *leaves: np.stack(leaves).reshape(*clients.shape, *leaves[0].shape), *sum(drawn, []))
