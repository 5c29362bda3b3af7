"""The mechanism of differential privacy: clip contributions by their norm, and add Gaussian noise.

A client's contribution u_i to a field is its reply, or the difference to the vector that the reply is the next
value of (y_i - y, x_i - x). It is clipped, clip(u, C) = u min(1, C / ||u||), and with the cohort S a round returns

    central    1/|S| (Σ_i clip(u_i, C) + σ C ξ)        the server is trusted, and adds noise to the sum
    local      1/|S| Σ_i (clip(u_i, C) + σ C ξ_i)      no one is trusted: each client adds noise before it sends

with ξ standard normal, drawn from a secret (`_secret.py`). In central mode |S| is the number of clients that were
asked, and a client that does not answer contributes nothing. In local mode the server sees which clients
answered, and |S| is their number.

All data of one client are protected together. Two federations are neighbours if they differ in the data of one
client (replace-one), so the sum moves by at most 2C and one upload is a Gaussian mechanism of multiplier σ/2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..aggregate import not_finite
from ..engines import Call, Reason, Replies
from ..steps import present
from ._secret import Secret
from ._settings import Privacy

BELOW = np.float32(1 - 1e-5)  # A float32 norm is not exact; with this factor no clipped vector exceeds the bound.


class NoisySum:
    """The sum of the clipped contributions of a round. Its value has the noise of central privacy."""

    def __init__(self, privacy: Privacy, secret: Secret, call: Call) -> None:
        self._privacy, self._secret = privacy, secret
        self._call, self._before = call, _on_host(call.before)
        self._sums: dict[str, Array] = {}
        self._empty: Any = None
        self.count = 0

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Reason]:
        """Add stacked replies, all with weight one; a reply that is not finite contributes nothing."""
        rejected = not_finite(replies)
        valid = np.asarray([client not in rejected for client in replies.clients], bool)
        for name in present(replies.reply):
            rows = getattr(replies.reply, name)
            total = _clipped_sum(rows, self._before.get(name, 0.0), valid, self._privacy.bound(name))
            total = total.addressable_data(0)  # the first of the equal copies on several devices
            self._sums[name] = self._sums[name] + total if name in self._sums else total
        self._empty = replies.reply._replace(**dict.fromkeys(replies.reply._fields))
        self.count += int(valid.sum())
        return rejected

    @property
    def value(self) -> Any:
        request = self._secret.request(self._call)
        noised = {name: self._noised(name, total, request) for name, total in self._sums.items()}
        return self._empty._replace(**noised)

    def _noised(self, name: str, total: Array, request: bytes) -> Array:
        noise = _noise(self._privacy, self._secret, name, request, np.asarray(total))
        return (total + noise) / np.float32(len(self._call.clients)) + self._before.get(name, 0.0)


def noisy(chunk: Replies, call: Call, privacy: Privacy, secret: Secret) -> Replies | None:
    """Clip the contributions of replies and add noise to them, as clients do before they send.

    A contribution that is not finite is replaced by zero, because its absence would reveal something about the
    data. The result is None if the replies do not have the form that the step returns: the federation would reject
    them even without privacy.
    """
    before = _on_host(call.before)
    if not _has_form(call, chunk, before):
        return None
    request, sent = secret.request(call), {}
    for name in present(chunk.reply):
        own = before.get(name, 0.0)
        rows = np.asarray(_clipped(getattr(chunk.reply, name), own, privacy.bound(name)))
        noise = [
            _noise(privacy, secret, name, request, row, client)
            for client, row in zip(chunk.clients, rows, strict=True)
        ]
        sent[name] = jnp.asarray(rows + np.stack(noise) + own)
    return dataclasses.replace(chunk, reply=chunk.reply._replace(**sent))


def _on_host(vectors: Mapping[str, Array]) -> dict[str, np.ndarray]:
    """Vectors as NumPy arrays, which can be combined with replies on any device."""
    return {name: np.asarray(vector) for name, vector in vectors.items()}


def _has_form(call: Call, chunk: Replies, before: Mapping[str, np.ndarray]) -> bool:
    """Whether replies have the step's fields and types, and `Next` fields the shapes of their vectors."""
    if not chunk.clients or getattr(chunk.reply, "_fields", ()) != tuple(call.step.reply):
        return False
    rows = {name: getattr(chunk.reply, name) for name in present(chunk.reply)}
    return all(
        a.dtype == np.float32 and a.shape[1:] == np.shape(before.get(name, a[0])) for name, a in rows.items()
    )


@jax.jit
def _clipped(rows: Array, before: Array | float, bound: float) -> Array:
    """clip(r_i - before, C) for every row; zero for a row that is not finite."""
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


def _noise(
    privacy: Privacy, secret: Secret, name: str, request: bytes, clipped: np.ndarray, client: int | None = None
) -> np.ndarray:
    """σ C ξ for the clipped values of a field; with local privacy, those of one client."""
    bound = privacy.bound(name)
    release = request, name, client, privacy.noise, bound, clipped.tobytes()
    return np.float32(privacy.noise * bound) * secret.noise(*release, shape=clipped.shape)
