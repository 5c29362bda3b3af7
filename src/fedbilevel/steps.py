"""Client steps, and the descriptors of the samples they work on.

A client step is a pure function of the module level: the client's oracle and arrays in, a NamedTuple out. It
is registered under its name, so that an engine in another process can find it. The fields of the NamedTuple
are annotated with `X`, `Y`, `Scalar` or, for matrices, `XY` and `YY`; a reply that does not fit is not a reply.

Sampling is a descriptor, not data. The rows are drawn from the address (seed, round, client, argument) where
the client's data are, so every engine draws the same rows and the server never names one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Annotated, Any, Generic, Literal, NamedTuple, ParamSpec, TypeVar, get_args, get_type_hints

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from . import rng
from .errors import SettingsError, UnknownName

PartName = Literal["lower", "upper"]
X = Annotated[Array, "x"]
Y = Annotated[Array, "y"]
Scalar = Annotated[Array, "scalar"]
XY = Annotated[Array, "xy"]  # a matrix with a row for each component of x and a column for each of y
YY = Annotated[Array, "yy"]  # a stack of matrices with rows and columns for the components of y

P = ParamSpec("P")
R = TypeVar("R", bound=tuple[Any, ...], covariant=True)

_registry: dict[str, Step[Any, Any]] = {}


@dataclass(frozen=True, eq=False)
class Step(Generic[P, R]):
    """A registered client step. Call it as the function it wraps."""

    function: Callable[P, R]

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        return self.function(*args, **kwargs)

    @property
    def name(self) -> str:
        """The short name, under which the ledger books it."""
        return self.function.__name__

    @property
    def address(self) -> str:
        """The full name, under which another process finds it."""
        return f"{self.function.__module__}:{self.function.__qualname__}"

    @cached_property
    def reply(self) -> dict[str, str]:
        """The fields of the reply, each with its kind: x, y, scalar, xy or yy."""
        kinds = {}
        for field, hint in get_type_hints(self.reply_type, include_extras=True).items():
            kind = [a for h in (hint, *get_args(hint)) for a in getattr(h, "__metadata__", ())]
            if not kind:
                raise SettingsError(
                    f"step {self.name}: field {field} of its reply has no kind; use X, Y or Scalar"
                )
            kinds[field] = str(kind[0])
        return kinds

    @property
    def reply_type(self) -> Any:
        """The NamedTuple that the step returns."""
        return get_type_hints(self.function)["return"]


def client_step(function: Callable[P, R]) -> Step[P, R]:
    """Register a pure module-level function as a client step."""
    step = Step(function)
    _registry[step.address] = step
    return step


def find_step(address: str) -> Step[Any, Any]:
    """The step registered at an address such as `fedbilevel.algorithms.aggitd:gradients`."""
    if address not in _registry:
        raise UnknownName("client step", address, _registry)
    return _registry[address]


@dataclass(frozen=True)
class PerClient:
    """An argument with a value of its own for each registered client: numbers, or the rows of an array."""

    values: Any


@dataclass(frozen=True)
class Sample:
    """One draw of `size` rows of a part without replacement; None is all of them."""

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
    """`epochs` passes over the part in shuffled minibatches of `size`; the last of a pass may be short."""

    part: PartName
    size: int | None
    epochs: int


Descriptor = Sample | Samples | Epochs


class Draw(NamedTuple):
    """The rows of one draw: their places and weights, or None and None for all rows of the part."""

    index: Any
    weight: Any


class Stream(NamedTuple):
    """A sequence of draws, as long as the longest client's; a client's own steps are the `active` ones."""

    draws: Draw
    active: Any

    @property
    def steps(self) -> Any:
        """τ_i, the number of steps of this client."""
        return jnp.sum(self.active)


def draw(descriptor: Descriptor, address: tuple[int | str, ...], client: int, rows: int, capacity: int) -> Any:
    """Draw rows for one client: a `Draw` for a `Sample`, a `Stream` for the others.

    `address` is (seed, ...); `rows` is how many the client has, `capacity` how many any client has.
    """
    if isinstance(descriptor, Sample):
        if descriptor.size is None:
            return Draw(None, None)
        generator = rng.generator(int(address[0]), *address[1:], client)
        return _padded([generator.permutation(rows)[: descriptor.size]], 1, descriptor.size, squeeze=True)
    if isinstance(descriptor, Samples):
        own, longest = _count(descriptor.count, client)
        if descriptor.size is None:
            return Stream(Draw(None, None), np.arange(longest) < own)
        generator = rng.generator(int(address[0]), *address[1:], client)
        chosen = [generator.permutation(rows)[: descriptor.size] for _ in range(own)]
        return Stream(_padded(chosen, longest, descriptor.size), np.arange(longest) < own)
    if descriptor.size is None:
        return Stream(Draw(None, None), np.ones(descriptor.epochs, bool))
    size = descriptor.size
    generator = rng.generator(int(address[0]), *address[1:], client)
    batches = -(-rows // size)  # of a pass; the last of them may be short
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


def walk(move: Callable[[Array, Draw], Array], start: Array, stream: Stream) -> Array:
    """Apply `move(value, draw)` along a stream; a client whose steps are over stays where it is."""

    def body(value: Array, item: tuple[Draw, Array]) -> tuple[Array, None]:
        rows, active = item
        return jnp.where(active, move(value, rows), value), None

    return lax.scan(body, start, (stream.draws, stream.active))[0]


def svrg(
    gradient: Callable[[Array, Draw], Array], anchor: Array, q: Array, step: Array | float, stream: Stream
) -> Array:
    """SVRG-type local steps from the anchor a:  v ← v - step (∇(v; b) - ∇(a; b) + q)  along the draws b.

    At v = a the two gradients are equal whatever b is, so the first step is v = a - step q and costs nothing.
    On full batches ∇(a; b) is the same at every step and is computed once; on others the two gradients are one
    batched computation, as a small step costs its number of operations and not their size.
    """
    first = jnp.where(stream.active[0], anchor - step * q, anchor)
    rest = jax.tree.map(lambda a: a[1:], stream)
    if stream.active.shape[0] == 1:
        return first
    if stream.draws.index is None:
        correction = q - gradient(anchor, stream.draws)
        return walk(lambda v, b: v - step * (gradient(v, b) + correction), first, rest)

    def move(v: Array, b: Draw) -> Array:
        here, there = jax.vmap(lambda at: gradient(at, b))(jnp.stack([v, anchor]))
        return v - step * (here - there + q)

    return walk(move, first, rest)


def sgd(gradient: Callable[[Array, Draw], Array], start: Array, step: Array | float, stream: Stream) -> Array:
    """Plain local steps:  v ← v - step ∇(v; b)  along the draws b."""
    return walk(lambda v, b: v - step * gradient(v, b), start, stream)
