"""Clients of like size served together, so that a small client is not padded to the rows of the largest one.

The clients of a chunk are sorted by size and cut into groups of equally many. The rows of a group are padded to a
share of the capacity of all registered clients, one of a few, and the minibatches of a pass are fewer with it. A
program is compiled for each share that occurs. So a chunk is cut only if this saves a good part of its rows, and
more work than the further calls of programs cost. Which groups there are depends on nothing but the chunk, so that
a resumed run computes the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..data import ClientSize

SHARES = (0.1, 0.25, 0.45, 0.7, 1.0)  # the numbers of rows of a group, as shares of the capacity
GROUPS = 16  # about the most groups of a chunk, unless each of them has one client a device
SAVED = 0.25  # the share of the rows that has to be saved
A_CALL = 2**25  # what a call of a program costs the host, as a number of rows times the work of a row


class Group(NamedTuple):
    """Clients that are served by one call of a program.

    clients   as many as the program serves; the last of them may be repeated
    places    their places in the chunk, without the repeated ones
    rows      the numbers of rows that they are padded to
    """

    clients: tuple[int, ...]
    places: tuple[int, ...]
    rows: ClientSize


def groups_of(
    chunk: Sequence[int], sizes: Sequence[ClientSize], capacity: ClientSize, lanes: int, width: int
) -> list[Group]:
    """The groups of a chunk, the largest clients first; none if it does not pay to cut the chunk.

    lanes   the number of devices
    width   the work of a row
    """
    own = [max(rows / most for rows, most in zip(size, capacity, strict=True)) for size in sizes]
    order = sorted(range(len(chunk)), key=lambda place: -own[place])
    count = lanes * max(1, len(chunk) // (lanes * GROUPS))
    made = []
    for places in (order[start : start + count] for start in range(0, len(chunk), count)):
        share = next((share for share in SHARES if share >= own[places[0]]), 1.0)
        filled = places + places[-1:] * (count - len(places))
        rows = ClientSize(*(math.ceil(share * most) for most in capacity))
        made.append(Group(tuple(chunk[place] for place in filled), tuple(places), rows))
    before = len(chunk) * sum(capacity)
    saved = before - count * sum(sum(group.rows) for group in made)
    return made if saved >= SAVED * before and saved * width >= A_CALL * (len(made) - 1) else []


def in_order(groups: Sequence[Group], lanes: int) -> np.ndarray:
    """For each place of the chunk, where its client is in the results of all groups, device after device."""
    each = len(groups[0].clients) // lanes
    where = np.zeros(sum(len(group.places) for group in groups), np.int32)
    for number, group in enumerate(groups):
        for i, place in enumerate(group.places):
            where[place] = (i // each * len(groups) + number) * each + i % each
    return where


def joined(parts: Sequence[Any], order: Array, lanes: int) -> Any:
    """The stacked results of all groups as one, in the order of the chunk."""

    def join(*leaves: Array) -> Array:
        by_lane = [leaf.reshape(lanes, -1, *leaf.shape[1:]) for leaf in leaves]
        return jnp.concatenate(by_lane, axis=1).reshape(-1, *leaves[0].shape[1:])[order]

    return jax.tree.map(join, *parts)
