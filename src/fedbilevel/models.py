"""Models in two halves: the body is the upper variable, the head the lower one."""

from __future__ import annotations

from typing import NamedTuple

import equinox as eqx
import jax
from jax import Array


class TwoHalves(NamedTuple):
    """A network cut in two: features = body(inputs), scores = head(features), both on a batch of rows."""

    body: eqx.Module
    head: eqx.Module


class Dense(eqx.Module):
    """Fully connected layers with ReLU between them, and after the last when `activate_last`."""

    layers: tuple[eqx.nn.Linear, ...]
    activate_last: bool = eqx.field(static=True)

    def __init__(self, sizes: tuple[int, ...], *, activate_last: bool, key: Array) -> None:
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = tuple(
            eqx.nn.Linear(a, b, key=k) for a, b, k in zip(sizes[:-1], sizes[1:], keys, strict=True)
        )
        self.activate_last = activate_last

    def __call__(self, rows: Array) -> Array:
        for i, layer in enumerate(self.layers):
            rows = jax.vmap(layer)(rows)
            if self.activate_last or i < len(self.layers) - 1:
                rows = jax.nn.relu(rows)
        return rows


def mlp(inputs: int, hidden: int, classes: int, *, key: Array) -> TwoHalves:
    """inputs-hidden-classes with ReLU. At 784-200-10 the body has 157,000 parameters, the head 2,010."""
    body, head = jax.random.split(key)
    return TwoHalves(
        Dense((inputs, hidden), activate_last=True, key=body),
        Dense((hidden, classes), activate_last=False, key=head),
    )
