"""Rules within a program that JAX traces, where many rounds run without the host.

They do what the rules of the same names in `_rules.py` do on the host. A reply that is not finite ends such a
program, so all rows count here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import jax.numpy as jnp
from jax import Array

TracedRule = Callable[[Array, Array], Array]


@runtime_checkable
class Traceable(Protocol):
    """A rule that also works within a program.

    traced   traced(rows, weights) for arrays of JAX, as the rule itself for those of NumPy; None if the settings
             of the rule allow no such function
    """

    @property
    def traced(self) -> TracedRule | None: ...


def traced_rule(rule: object) -> TracedRule | None:
    """A rule within a program, which is looked up by it; None if it needs the host or cannot be looked up."""
    try:
        hash(rule)
    except TypeError:
        return None
    return rule.traced if isinstance(rule, Traceable) else None


def median(rows: Array, weights: Array) -> Array:
    """The weighted median, coordinate by coordinate: the midpoint of two values that halve the weight."""
    own = weights[:, None]
    upto = jnp.sum(jnp.where(_not_after(rows), own, 0.0), axis=1)  # the weight up to each reply and with it
    half = jnp.sum(weights) / 2
    low, high = (upto >= half) & (upto - own < half), (upto > half) & (upto - own <= half)
    return jnp.sum(jnp.where(low, 0.5 * rows, 0.0) + jnp.where(high, 0.5 * rows, 0.0), axis=0)


def trimmed_mean(rows: Array, weights: Array, cut: int) -> Array:
    """The mean without so many replies at each end, coordinate by coordinate."""
    place = jnp.sum(_not_after(rows).astype(jnp.float32), axis=1)  # from 1, in order
    kept = jnp.where((place > cut) & (place <= len(rows) - cut), weights[:, None], 0.0)
    return jnp.sum(kept / jnp.sum(kept, axis=0) * rows, axis=0)


def norm_bound(rows: Array, weights: Array, radius: float | None) -> Array:
    """1/W Σ_i w_i clip(r_i, τ)"""
    norms = _norms(rows)
    return _clipped_mean(rows, norms, _middle(norms, weights) if radius is None else radius, weights)


def centred_clipping(rows: Array, weights: Array, radius: float | None, iterations: int) -> Array:
    """v ← v + 1/W Σ_i w_i clip(r_i - v, τ), a few times from the median."""
    v = median(rows, weights)
    reach = _middle(_norms(rows - v), weights) if radius is None else radius
    for _ in range(iterations):
        v = v + _clipped_mean(rows - v, _norms(rows - v), reach, weights)
    return v


def _not_after(rows: Array) -> Array:
    """At [i, j], for each coordinate, whether reply j comes up to i when they are sorted. Equal ones keep places.

    XLA compiles a program with a sort into many functions, which takes several times as long for small vectors.
    """
    at = jnp.arange(len(rows))
    earlier = (at[None, :] <= at[:, None])[..., None]
    return (rows[None] < rows[:, None]) | ((rows[None] == rows[:, None]) & earlier)


def _norms(rows: Array) -> Array:
    return jnp.sqrt(jnp.sum(rows * rows, axis=1))


def _middle(norms: Array, weights: Array) -> Array:
    return median(norms[:, None], weights)[0]


def _clipped_mean(rows: Array, norms: Array, radius: Array | float, weights: Array) -> Array:
    """1/W Σ_i w_i clip(r_i, τ)"""
    largest = jnp.maximum(norms, radius)
    clip = jnp.where(largest > 0, radius / jnp.where(largest > 0, largest, 1.0), 0.0)
    return (weights * clip / jnp.sum(weights)) @ rows
