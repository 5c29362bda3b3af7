"""Rows of data as a loss sees them."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import Array

PyTree = Any


class Batch(NamedTuple):
    """Rows of data as a loss sees them.

    `features` is `embed(x, inputs)`, or `inputs` when the problem has no `embed`. `weights` is one for a
    row and zero for padding: average over rows with `mean`, never with `jnp.mean`. `key` is for the random choices
    of a loss, such as dropout; it is None in measurements and for problems whose losses are not random.

    `ids` are the places of the rows among the client's rows of this part, from 0 on. A row has the same id in
    every minibatch, round and engine, so `own[ids]` are the rows' own variables. `own` are the client's own
    variables (see `Problem`); it is None if there are none, and for test rows, which belong to no client.
    """

    inputs: PyTree
    targets: PyTree
    weights: Array
    features: PyTree
    key: Array | None = None
    ids: Array | None = None
    own: PyTree = None

    def mean(self, values: Array) -> Array:
        """Σ_r w_r v_r / Σ_r w_r over the rows r; zero if there are no rows."""
        total = jnp.sum(self.weights)
        return jnp.tensordot(self.weights, values, axes=1) / jnp.where(total > 0, total, 1.0)
