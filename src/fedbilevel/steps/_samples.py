"""Descriptors of samples, and the rows that are drawn for them.

Sampling is a descriptor, not data. The rows are drawn from the address of the call, the argument and the client,
where the client's data are. So every engine draws the same rows, and the server never names one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..rng import Address

PartName = Literal["lower", "upper"]


@dataclass(frozen=True)
class PerClient:
    """An argument with a value of its own for each registered client: numbers, or the rows of an array."""

    values: Any


@dataclass(frozen=True)
class Sample:
    """One draw of `size` rows of a part without replacement; a size of None means all rows."""

    part: PartName
    size: int | None = None


@dataclass(frozen=True)
class Samples:
    """`count` independent draws of `size` rows; the count may differ from client to client."""

    part: PartName
    size: int | None
    count: int | PerClient


@dataclass(frozen=True)
class Epochs:
    """`epochs` passes over the part in shuffled minibatches of `size`; the last one of a pass may be short."""

    part: PartName
    size: int | None
    epochs: int


Descriptor = Sample | Samples | Epochs


class Draw(NamedTuple):
    """The rows of one draw: their places and weights, or None and None for all rows of the part."""

    index: Any
    weight: Any


class Stream(NamedTuple):
    """A sequence of draws, as long as the longest of any client; a client takes only the `active` steps."""

    draws: Draw
    active: Any

    @property
    def steps(self) -> Any:
        """τ_i, the number of steps of this client."""
        return jnp.sum(self.active)


def draw(descriptor: Descriptor, address: Address, name: str, client: int, rows: int, capacity: int) -> Any:
    """Draw rows for one client: a `Draw` for a `Sample`, a `Stream` for the others.

    `name` is the argument that the draw is for, `rows` the number of the client's rows, and `capacity` the largest
    number of rows of any client.
    """
    if isinstance(descriptor, Sample):
        if descriptor.size is None:
            return Draw(None, None)
        generator = address.generator(name, client)
        return _padded([generator.permutation(rows)[: descriptor.size]], 1, descriptor.size, squeeze=True)
    if isinstance(descriptor, Samples):
        own, longest = _count(descriptor.count, client)
        if descriptor.size is None:
            return Stream(Draw(None, None), np.arange(longest) < own)
        generator = address.generator(name, client)
        chosen = [generator.permutation(rows)[: descriptor.size] for _ in range(own)]
        return Stream(_padded(chosen, longest, descriptor.size), np.arange(longest) < own)
    if descriptor.size is None:
        return Stream(Draw(None, None), np.ones(descriptor.epochs, bool))
    size = descriptor.size
    generator = address.generator(name, client)
    batches = -(-rows // size)  # the number in a pass; the last one may be short
    own, longest = descriptor.epochs * batches, descriptor.epochs * -(-capacity // size)
    index, weight = np.zeros((longest, size), np.int32), np.zeros((longest, size), np.float32)
    orders, counted = (a[:own].reshape(descriptor.epochs, batches * size)[:, :rows] for a in (index, weight))
    for order in orders:
        order[:] = generator.permutation(rows)
    counted[:] = 1.0
    return Stream(Draw(index, weight), np.arange(longest) < own)


def _count(count: int | PerClient, client: int) -> tuple[int, int]:
    if isinstance(count, PerClient):
        return int(count.values[client]), int(max(count.values))
    return count, count


def _padded(chosen: list[np.ndarray], length: int, size: int, squeeze: bool = False) -> Draw:
    index, weight = np.zeros((length, size), np.int32), np.zeros((length, size), np.float32)
    for i, rows in enumerate(chosen):
        index[i, : len(rows)], weight[i, : len(rows)] = rows, 1.0
    return Draw(index[0], weight[0]) if squeeze else Draw(index, weight)
