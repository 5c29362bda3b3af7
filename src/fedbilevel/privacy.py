"""Differential privacy of what clients upload: clip by norm, add Gaussian noise, account for all of it.

A client's contribution u_i to a field is its reply, or the difference to the vector that the reply is the next
value of (y_i - y, x_i - x). It is clipped, clip(u, C) = u min(1, C / ||u||), and with the cohort S a round returns

    central    1/|S| (Σ_i clip(u_i, C) + σ C ξ)        the server is trusted, and adds noise to the sum
    local      1/|S| Σ_i (clip(u_i, C) + σ C ξ_i)      nobody is trusted: a reply has its noise when it leaves

with ξ standard normal. |S| is how many were asked, not how many answered; who does not answer contributes nothing.

What is protected: all data of one client. Two federations are neighbours if they differ in the data of one client
(replace-one), so the sum moves by at most 2C and one upload is a Gaussian mechanism of multiplier σ/2.

The uploads of one outer iteration come from one cohort. Given the cohort, k vectors with the sensitivity 2C and
the noise σ C each are one Gaussian mechanism of multiplier σ / (2 √k), also when each depends on those before it
(Dong, Roth and Su 2022, on composing Gaussian mechanisms). The cohort is drawn once for all k, as a fixed number
of clients without replacement: its amplification applies to the k together and not to each (Wang, Balle and
Kasiviswanathan 2019, theorem 27). Cohorts compose. Against a server that sees replies there is no amplification:
local privacy is charged every upload of the client that sent the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from types import ModuleType
from typing import Annotated, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from pydantic import Field

from . import rng
from .aggregate import not_finite, present
from .engines.base import Call, Engine, Replies
from .errors import SettingsError
from .settings import Positive, about, settings

ORDERS = (
    1.1,
    1.25,
    1.5,
    2,
    2.5,
    3,
    3.5,
    4,
    4.5,
    5,
    6,
    7,
    8,
    9,
    10,
    12,
    14,
    16,
    20,
    24,
    28,
    32,
    40,
    48,
    64,
    96,
    128,
)
BELOW = np.float32(1 - 1e-5)  # a norm in float32 is not exact; a clipped vector is never longer than the bound


@settings
class Privacy:
    """Differential privacy of what clients upload; none when mode is left out."""

    mode: Annotated[
        Literal["central", "local"] | None,
        about("central: the server adds noise to the sum; local: each client to its reply; left out: no privacy"),
    ] = None
    clip: Annotated[
        Positive | dict[str, Positive] | None,
        about("bound C on the norm of a contribution: a number, or one for each field of a reply; left out: 1"),
    ] = None
    noise: Annotated[Positive | None, about("noise multiplier σ: the noise has deviation σ C; left out: 1")] = None
    delta: Annotated[
        Annotated[float, Field(gt=0, lt=1)] | None, about("δ, at which epsilon is given; left out: 1e-5")
    ] = None

    @property
    def multiplier(self) -> float:
        """σ"""
        return 1.0 if self.noise is None else self.noise

    @property
    def at_delta(self) -> float:
        """δ"""
        return 1e-5 if self.delta is None else self.delta

    def check(self, weighting: str, aggregator: object | None) -> None:
        """Raise if the noise is not made for how replies are put together."""
        if self.mode is not None and weighting != "uniform":
            raise SettingsError(
                f"weighting = {weighting!r} is wrong with privacy: the noise is for equal weights; use 'uniform'"
            )
        if self.mode == "central" and aggregator is not None:
            raise SettingsError(
                "aggregator is wrong with privacy.mode = 'central': its noise is for the mean; leave it out, "
                "or use 'local'"
            )

    def bound(self, field: str) -> float:
        """C for a field of a reply."""
        if not isinstance(self.clip, dict):
            return 1.0 if self.clip is None else self.clip
        if field not in self.clip:
            raise SettingsError(
                f"privacy.clip = {self.clip!r} is wrong: clients upload {field} too; give a bound for it"
            )
        return self.clip[field]

    def book(self, releases: Counter[str], clients: tuple[int, ...], before: int, uploads: int) -> None:
        """Note what one round of a cohort uploaded, `before` vectors after the cohort was drawn.

        central: under "cohort:vectors", how many cohorts of that size uploaded so many vectors;
        local: under the client, how many vectors it uploaded.
        """
        if self.mode == "local":
            releases.update({str(client): uploads for client in clients})
            return
        if before:
            releases[f"{len(clients)}:{before}"] -= 1
        releases[f"{len(clients)}:{before + uploads}"] += 1
        for key in [key for key, count in releases.items() if count == 0]:
            del releases[key]

    def epsilon(self, releases: Mapping[str, int], clients: int) -> float:
        """ε at δ for what was booked, when there are so many registered clients."""
        if not releases:
            return 0.0
        if self.mode == "local":
            most = max(releases.values())
            return _epsilon(((clients, clients, most, 1),), self.multiplier / 2, self.at_delta)
        parsed = ((*map(int, key.split(":")), count) for key, count in sorted(releases.items()))
        spent = tuple((clients, cohort, uploads, count) for cohort, uploads, count in parsed)
        return _epsilon(spent, self.multiplier / 2, self.at_delta)


class NoisySum:
    """The clipped contributions of a round, added up; its value has the noise of central privacy."""

    def __init__(self, privacy: Privacy, call: Call) -> None:
        self._privacy, self._call, self._before = privacy, call, _on_host(call.before)
        self._sums: dict[str, Array] = {}
        self._empty: Any = None
        self.count = 0

    @property
    def fields(self) -> list[str] | None:
        return None if self._empty is None else list(self._sums)

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, str]:
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


class NoisyReplies:
    """An engine whose clients clip their contributions and add noise to them before they leave: local privacy.

    Probes are answered as they are: a private run has none.
    """

    def __init__(self, engine: Engine, privacy: Privacy) -> None:
        self.problem, self.clients = engine.problem, engine.clients
        self._engine, self._privacy = engine, privacy

    def replies(self, call: Call) -> Iterator[Replies]:
        for chunk in self._engine.replies(call):
            made = noisy(chunk, call, self._privacy) if call.address[1] == "round" else None
            yield chunk if made is None else made

    def close(self) -> None:
        self._engine.close()


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
    return chunk._replace(reply=chunk.reply._replace(**sent))


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
    seed, _, place = call.address
    return rng.generator(int(seed), "privacy", place, name, *client)


def _noise(privacy: Privacy, name: str, generator: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """σ C ξ"""
    return np.float32(privacy.multiplier * privacy.bound(name)) * generator.standard_normal(shape, np.float32)


def accounting() -> ModuleType:
    """The accountant library, which only private runs need."""
    try:
        import dp_accounting
    except ImportError:
        raise SettingsError(
            "privacy.mode needs an accountant; install it with: pip install 'fedbilevel[privacy]'"
        ) from None
    return dp_accounting


@lru_cache(maxsize=64)
def _epsilon(spent: tuple[tuple[int, int, int, int], ...], multiplier: float, delta: float) -> float:
    """ε for `count` cohorts of so many clients that uploaded so many vectors each, for every entry of `spent`.

    An upload is a Gaussian mechanism of this multiplier: deviation of the noise over the sensitivity.
    """
    dp = accounting()
    events = []
    for clients, cohort, uploads, count in spent:
        together = dp.SelfComposedDpEvent(dp.GaussianDpEvent(multiplier), uploads)
        sampled = dp.SampledWithoutReplacementDpEvent(clients, cohort, together)
        events.append(dp.SelfComposedDpEvent(sampled if cohort < clients else together, count))
    return epsilon_of(dp.ComposedDpEvent(events), delta, "REPLACE_ONE")


def epsilon_of(event: Any, delta: float, relation: str, orders: tuple[float, ...] = ORDERS) -> float:
    """ε at δ of an event of the accountant library, by Rényi accounting at these orders."""
    accountant = accounting().rdp.RdpAccountant(orders, accounting().NeighboringRelation[relation])
    return float(accountant.compose(event).get_epsilon(delta))
