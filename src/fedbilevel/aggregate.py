"""Putting replies together: which are finite, their weighted mean, and the mixing of gossip."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .engines.base import Replies


class Mean:
    """The running weighted mean of valid replies."""

    def __init__(self) -> None:
        self.total: Any = None
        self.weight, self.count = 0.0, 0

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, str]:
        """Add stacked replies; return who was left out because a vector is not finite."""
        finite, total = _finite_sum(replies.reply, weights)
        left_out = _complaints(replies, finite)
        self.total = total if self.total is None else jax.tree.map(jnp.add, self.total, total)
        valid = np.asarray([client not in left_out for client in replies.clients])
        self.weight += float(weights[valid].sum())
        self.count += int(valid.sum())
        return left_out

    @property
    def value(self) -> Any:
        return jax.tree.map(partial(_divide, by=np.float32(self.weight)), self.total)


def not_finite(replies: Replies) -> dict[int, str]:
    """Which of stacked replies have a vector that is not finite, and which vector."""
    return _complaints(replies, _finite(replies.reply._asdict()))


def _complaints(replies: Replies, finite: dict[str, Array]) -> dict[int, str]:
    flags = {name: np.asarray(ok) for name, ok in finite.items()}
    return {
        client: f"{name} is not finite"
        for name, ok in reversed(flags.items())
        for client, good in zip(replies.clients, ok, strict=True)
        if not good
    }


@jax.jit
def _finite(fields: dict[str, Array]) -> dict[str, Array]:
    return {
        name: jnp.all(jnp.isfinite(a), axis=tuple(range(1, a.ndim))) for name, a in fields.items() if a is not None
    }


@jax.jit
def mix(weights: Array, rows: dict[str, Array]) -> dict[str, Array]:
    return {name: jnp.tensordot(weights, a, axes=1) for name, a in rows.items()}


@jax.jit
def _finite_sum(reply: Any, weights: Array) -> tuple[dict[str, Array], Any]:
    """Which replies are finite, field by field, and Σ_i w_i r_i over the clients i all of whose fields are."""
    finite = _finite(reply._asdict())
    valid = jnp.all(jnp.stack(list(finite.values())), axis=0)
    kept = jnp.where(valid, weights, 0.0)

    def total(a: Array) -> Array:
        return jnp.tensordot(kept, jnp.where(jnp.expand_dims(valid, tuple(range(1, a.ndim))), a, 0.0), axes=1)

    return finite, jax.tree.map(total, reply)


@jax.jit
def _divide(a: Array, by: Array) -> Array:
    return a / by
