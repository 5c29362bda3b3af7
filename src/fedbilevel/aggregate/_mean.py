"""The weighted mean of finite replies, summed as they arrive, and the mixing of gossip."""

from __future__ import annotations

from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..engines import Fault, Reason, Replies
from ..steps import present

LARGEST = 1e15  # A reply with a larger entry is not valid.


class Accumulator(Protocol):
    """Aggregates the replies of one round. A new accumulator is made for every round.

    count   the number of valid replies so far
    value   the result of the round, as the step's NamedTuple
    """

    count: int

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Add stacked replies; return the clients whose reply is not used, each with the reason."""

    @property
    def value(self) -> Any: ...


class Mean:
    """The running weighted mean of valid replies."""

    def __init__(self) -> None:
        self.total: Any = None
        self.weight, self.count = 0.0, 0
        self._whole: Any = None  # the mean of all replies, if the engine has made it

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Add stacked replies; return the clients whose reply is not used because a vector is not finite."""
        if replies.mean is not None and bool(replies.mean.sound):
            self._whole, self.count = replies.mean.value, len(replies.clients)
            return {}
        # Without names, steps whose replies have equal shapes share one program.
        arrays, tree = jax.tree.flatten(replies.reply)
        finite, sums = _finite_sum(arrays, weights)
        rejected = _complaints(replies, finite)
        total = jax.tree.unflatten(tree, map(_on_one_device, sums))
        self.total = total if self.total is None else jax.tree.map(jnp.add, self.total, total)
        valid = np.asarray([client not in rejected for client in replies.clients])
        self.weight += float(weights[valid].sum())
        self.count += int(valid.sum())
        return rejected

    @property
    def value(self) -> Any:
        if self._whole is not None:
            return self._whole
        return jax.tree.map(partial(_divide, by=np.float32(self.weight)), self.total)


class Apart:
    """All valid replies, as rows."""

    def __init__(self) -> None:
        self.count = 0
        self._rows: list[Any] = []

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Add stacked replies; return the clients whose reply is not used because a vector is not finite."""
        rejected = not_finite(replies)
        valid = np.asarray([client not in rejected for client in replies.clients])
        self._rows.append(jax.tree.map(lambda a: np.asarray(a)[valid], replies.reply))
        self.count += int(valid.sum())
        return rejected

    @property
    def value(self) -> Any:
        return jax.tree.map(lambda *rows: np.concatenate(rows), *self._rows)


def not_finite(replies: Replies) -> dict[int, Reason]:
    """The clients whose reply has a vector that is not finite, each with a reason that names the vector."""
    return _complaints(replies, _finite(jax.tree.leaves(replies.reply)))


def _complaints(replies: Replies, sound: list[Array]) -> dict[int, Reason]:
    names, arrays = present(replies.reply), jax.tree.leaves(replies.reply)
    return {
        replies.clients[i]: _what_is_wrong(name, a[i])
        for name, a, ok in reversed(list(zip(names, arrays, map(np.asarray, sound), strict=True)))
        for i in np.flatnonzero(~ok)
    }


def _what_is_wrong(name: str, a: Any) -> Reason:
    if np.isfinite(np.asarray(a)).all():
        return Reason(Fault.TOO_LARGE, f"{name} has an entry beyond {LARGEST:g}", name)
    return Reason(Fault.NOT_FINITE, f"{name} is not finite", name)


@jax.jit
def _finite(arrays: list[Array]) -> list[Array]:
    return [jnp.all(jnp.abs(a) <= LARGEST, axis=tuple(range(1, a.ndim))) for a in arrays]


def finite_mean(arrays: list[Array], weights: Array) -> tuple[Array, list[Array]]:
    """Whether all replies are finite, and their weighted mean, within a program that JAX traces."""
    return all_finite(arrays), [jnp.tensordot(weights, a, axes=1) / jnp.sum(weights) for a in arrays]


def all_finite(arrays: list[Array]) -> Array:
    """Whether all replies are finite, within a program that JAX traces."""
    return jnp.all(jnp.stack(_finite(arrays)))


@jax.jit
def mix(weights: Array, rows: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.tensordot(weights, a, axes=1) for name, a in rows.items()}


@jax.jit
def _finite_sum(arrays: list[Array], weights: Array) -> tuple[list[Array], list[Array]]:
    """For each array, which replies are finite; and Σ_i w_i r_i over the clients i whose arrays are all finite."""
    finite = _finite(arrays)
    valid = jnp.all(jnp.stack(finite), axis=0)
    kept = jnp.where(valid, weights, 0.0)

    def total(a: Array) -> Array:
        return jnp.tensordot(kept, jnp.where(jnp.expand_dims(valid, tuple(range(1, a.ndim))), a, 0.0), axes=1)

    return finite, [total(a) for a in arrays]


def _on_one_device(a: Array) -> Array:
    """The first copy of a sum that lies on several devices, so that later work is done only once."""
    return a.addressable_data(0)


@jax.jit
def _divide(a: Array, by: Array) -> Array:
    return a / by
