"""Descriptors of samples, and the rows that are drawn for them.

Sampling is a descriptor, not data. The rows are drawn from the address of the call, the argument and the client,
where the client's data are. So every engine draws the same rows, and the server never names one.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..rng import Address

PartName = Literal["lower", "upper"]
Chances = Literal["derivative", "step"]  # for how long the chance of a random loss stays the same


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
    """`count` independent draws of `size` rows; the count may differ from client to client.

    With `of`, every one of them has the rows that an earlier round, the one of this number, drew as a `Sample` for
    an argument of the same name.
    """

    part: PartName
    size: int | None
    count: int | PerClient
    of: int | None = None


@dataclass(frozen=True)
class Epochs:
    """`epochs` passes over the part in shuffled minibatches of `size`; the last one of a pass may be short."""

    part: PartName
    size: int | None
    epochs: int


Descriptor = Sample | Samples | Epochs


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Chance:
    """What decides the random choices of a loss, such as a mask of dropout.

    words   two words, the key of the choices
    anew    whether every derivative makes choices of its own; otherwise all derivatives of a draw share them
    """

    words: Any
    anew: bool = field(metadata={"static": True})

    def key(self, number: int | Array = 0) -> Array:
        """The JAX key of the choices. The numbers of derivatives give different keys if choices are made anew."""
        key = jax.random.wrap_key_data(jnp.asarray(self.words), impl="threefry2x32")
        return jax.random.fold_in(key, number) if self.anew else key

    def apart(self, number: int | Array) -> Chance:
        """The chance of a further derivative; it is the same one unless choices are made anew."""
        return replace(self, words=jax.random.key_data(self.key(number))) if self.anew else self


class Draw(NamedTuple):
    """The rows of one draw: their places and weights, or None and None for all rows of the part.

    `chance` is for problems with random losses, and None for all others.
    """

    index: Any
    weight: Any
    chance: Chance | None = None

    def apart(self, number: int | Array) -> Draw:
        """The same rows for a further derivative, whose loss is random on its own if the problem wants that."""
        return self if self.chance is None else self._replace(chance=self.chance.apart(number))


class Stream(NamedTuple):
    """A sequence of draws, as long as the longest of any client; a client takes only the `active` steps."""

    draws: Draw
    active: Any

    @property
    def steps(self) -> Any:
        """τ_i, the number of steps of this client."""
        return int(self.active.sum()) if isinstance(self.active, np.ndarray) else jnp.sum(self.active)


def draw(
    descriptor: Descriptor,
    address: Address,
    name: str,
    client: int,
    rows: int,
    capacity: int,
    chances: Chances | None = None,
) -> Any:
    """Draw rows for one client: a `Draw` for a `Sample`, a `Stream` for the others.

    `name` is the argument that the draw is for, `rows` the number of the client's rows, and `capacity` the largest
    number of rows of any client. With `chances` the losses are random, and every draw has a chance of its own.
    """
    own, longest = steps_of(descriptor, client, rows, capacity)
    draws = Draw(None, None)
    if descriptor.size is not None or chances is not None:
        generator = address.at(place_of(descriptor)).generator(name, client)
        if descriptor.size is not None:
            draws = Draw(*_rows(descriptor, descriptor.size, generator, own, longest, rows))
        if chances is not None:
            words = generator.integers(2**32, size=(longest, 2), dtype=np.uint32)
            draws = draws._replace(chance=Chance(words, chances == "derivative"))
    if not isinstance(descriptor, Sample):
        return Stream(draws, np.arange(longest) < own)
    return jax.tree.map(lambda a: a[0], draws)


def place_of(descriptor: Descriptor) -> int | None:
    """The earlier round whose rows a descriptor takes again, or None."""
    return descriptor.of if isinstance(descriptor, Samples) else None


def steps_of(descriptor: Descriptor, client: int, rows: int, capacity: int) -> tuple[int, int]:
    """The number of a client's draws, and the largest number of any client."""
    if isinstance(descriptor, Sample):
        return 1, 1
    if isinstance(descriptor, Epochs):
        size = descriptor.size
        passes = (1, 1) if size is None else (-(-rows // size), -(-capacity // size))  # the last one may be short
        return descriptor.epochs * passes[0], descriptor.epochs * passes[1]
    count = descriptor.count
    if isinstance(count, PerClient):
        return int(count.values[client]), int(max(count.values))
    return count, count


def weights_of_rows(descriptor: Descriptor, size: int, own: int, longest: int, rows: int) -> np.ndarray:
    """The weights of the rows of a client's minibatches; the surplus minibatches and rows have weight zero."""
    weight = np.zeros((longest, size), np.float32)
    if isinstance(descriptor, Epochs):
        weight[:own].reshape(descriptor.epochs, own // descriptor.epochs * size)[:, :rows] = 1.0
    else:
        weight[:own, : min(size, rows)] = 1.0
    return weight


def _rows(
    descriptor: Descriptor, size: int, generator: np.random.Generator, own: int, longest: int, rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """The places and weights of minibatches."""
    index = np.zeros((longest, size), np.int32)
    weight = weights_of_rows(descriptor, size, own, longest, rows)
    if isinstance(descriptor, Epochs):
        for order in index[:own].reshape(descriptor.epochs, own // descriptor.epochs * size)[:, :rows]:
            order[:] = generator.permutation(rows)
        return index, weight
    taken = min(size, rows)
    if place_of(descriptor) is None:
        for step in range(own):
            index[step, :taken] = generator.permutation(rows)[:size]
    else:
        index[:own, :taken] = generator.permutation(rows)[:size]
    return index, weight
