"""The mechanism of differential privacy: clip contributions by their norm, and add Gaussian noise.

A client's contribution u_i to a field is its reply, or the difference to the vector that the reply is the next
value of (y_i - y, x_i - x). It is clipped, clip(u, C) = u min(1, C / ||u||), and with the cohort S a round returns

    central    1/|S| (Σ_i clip(u_i, C) + σ C ξ)        the server is trusted, and adds noise to the sum
    local      1/|S| Σ_i (clip(u_i, C) + σ C ξ_i)      nobody is trusted: a reply has its noise when it leaves

with ξ standard normal. In central mode |S| is how many clients were asked, not how many answered, and a client
that does not answer contributes nothing. In local mode, where the server sees who answered, |S| is how many did.

What is protected: all data of one client. Two federations are neighbours if they differ in the data of one client
(replace-one), so the sum moves by at most 2C and one upload is a Gaussian mechanism of multiplier σ/2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .. import rng
from ..aggregate import not_finite
from ..engines import Call, Reason, Replies
from ..steps import present
from ._settings import Privacy

BELOW = np.float32(1 - 1e-5)  # a norm in float32 is not exact; a clipped vector is never longer than the bound


class NoisySum:
    """The clipped contributions of a round, added up; its value has the noise of central privacy."""

    def __init__(self, privacy: Privacy, call: Call) -> None:
        self._privacy, self._call, self._before = privacy, call, _on_host(call.before)
        self._sums: dict[str, Array] = {}
        self._empty: Any = None
        self.count = 0

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Add stacked replies, all with weight one; a reply that is not finite contributes nothing."""
        left_out = not_finite(replies)
        valid = np.asarray([client not in left_out for client in replies.clients], bool)
        for name in present(replies.reply):
            rows = getattr(replies.reply, name)
            total = _clipped_sum(rows, self._before.get(name, 0.0), valid, self._privacy.bound(name))
            total = total.addressable_data(0)  # of the equal copies that a sum over several devices leaves
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._empty = replies.reply._replace(**dict.fromkeys(replies.reply._fields))
        self.count += int(valid.sum())
        return left_out

    @property
    def value(self) -> Any:
        return self._empty._replace(**{name: self._noised(name, total) for name, total in self._sums.items()})

    def _noised(self, name: str, total: Array) -> Array:
        noise = _noise(self._privacy, name, _generator(self._call, name), total.shape)
        return (total + noise) / np.float32(len(self._call.clients)) + self._before.get(name, 0.0)


def seeded(call: Call, name: str, clients: tuple[int, ...], rows: Array) -> list[np.random.Generator]:
    """The generators of a simulation's clients, from the seed of the run."""
    return [_generator(call, name, client) for client in clients]


Source = Callable[[Call, str, tuple[int, ...], Array], list[np.random.Generator]]


def noisy(chunk: Replies, call: Call, privacy: Privacy, source: Source = seeded) -> Replies | None:
    """Replies as they may leave their clients: contributions are clipped and get noise.

    A contribution that is not finite is replaced by zero, as its absence would tell something of the data. Replies
    that do not have the form of one are None: without privacy the federation rejects them, whatever they say.
    `source` has the generators of a field's noise, one for each client, for contributions that are clipped.
    """
    before = _on_host(call.before)
    if not _has_form(call, chunk, before):
        return None
    sent = {}
    for name in present(chunk.reply):
        own = before.get(name, 0.0)
        rows = _clipped(getattr(chunk.reply, name), own, privacy.bound(name))
        noise = [_noise(privacy, name, g, rows.shape[1:]) for g in source(call, name, chunk.clients, rows)]
        sent[name] = rows + np.stack(noise) + own
    return dataclasses.replace(chunk, reply=chunk.reply._replace(**sent))


def _on_host(vectors: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Vectors as arrays of no device, to go with replies of any."""
    return {name: np.asarray(vector) for name, vector in vectors.items()}


def _has_form(call: Call, chunk: Replies, before: Mapping[str, np.ndarray]) -> bool:
    """Whether replies have the fields and type of the step, and the shapes of the vectors they are the next of."""
    if not chunk.clients or getattr(chunk.reply, "_fields", ()) != tuple(call.step.reply):
        return False
    rows = {name: getattr(chunk.reply, name) for name in present(chunk.reply)}
    return all(
        a.dtype == np.float32 and a.shape[1:] == np.shape(before.get(name, a[0])) for name, a in rows.items()
    )


@jax.jit
def _clipped(rows: Array, before: Array | float, bound: float) -> Array:
    """clip(r_i - before, C) for every row; zero for one that is not finite."""
    apart = rows - before
    flat = apart.reshape(apart.shape[0], -1)
    finite = jnp.all(jnp.isfinite(flat), axis=1, keepdims=True)
    flat = jnp.where(finite, flat, 0.0)
    largest = jnp.max(jnp.abs(flat), axis=1, keepdims=True, initial=1e-30)
    norms = largest * jnp.linalg.norm(flat / largest, axis=1, keepdims=True)  # squares of large numbers overflow
    return (flat * jnp.minimum(1.0, bound * BELOW / norms)).reshape(apart.shape)


@jax.jit
def _clipped_sum(rows: Array, before: Array | float, valid: Array, bound: float) -> Array:
    return jnp.tensordot(valid.astype(jnp.float32), _clipped(rows, before, bound), axes=1)


def _generator(call: Call, name: str, *client: int) -> np.random.Generator:
    """At (seed, "privacy", round, field), and the client if it is the client's."""
    return rng.generator(call.address.seed, "privacy", call.address.place, name, *client)


def _noise(privacy: Privacy, name: str, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """σ C ξ"""
    return np.float32(privacy.noise * privacy.bound(name)) * generator.standard_normal(shape, np.float32)
