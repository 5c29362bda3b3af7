"""The accounting of a private federation: epsilon is computed from the uploads that are booked.

The uploads of one outer iteration come from one cohort. Given the cohort, k vectors with the sensitivity 2C and
the noise σ C each are one Gaussian mechanism of multiplier σ / (2 √k), also when each depends on those before it
(Dong, Roth and Su 2022, on composing Gaussian mechanisms). The cohort is drawn once for all k, as a fixed number
of clients without replacement: its amplification applies to the k together and not to each (Wang, Balle and
Kasiviswanathan 2019, theorem 27). Cohorts compose. Against a server that sees replies there is no amplification:
local privacy is charged every upload of the client that sent the most.
"""

from __future__ import annotations

import hashlib
import math
import secrets
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np

from ..engines import Call
from ..errors import SettingsError
from ..steps import present
from ._books import Books, CohortUploads, Entry, Release
from ._settings import Privacy

FINE = tuple(n / 2 for n in range(4, 11))
SMALLEST = 1e-3  # the smallest multiplier for which ε is computed exactly; it is then about 500,000
ORDERS = (1.1, 1.25, 1.5, *FINE, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)


class Accountant:
    """Books the uploads of a private federation, and computes the epsilon that they have spent.

    remember   whether clients remember something between cohorts, such as own variables; amplification by cohorts
               is not used then. A step whose clients keep something sets it too
    """

    def __init__(self, privacy: Privacy, books: Books | None = None, *, remember: bool = False) -> None:
        accounting()  # raises if the library is missing, before anything is uploaded
        self.privacy, self.books, self._remember = privacy, Books() if books is None else books, remember

    def book(self, call: Call, drawn: int, vectors: int, result: Any) -> None:
        """Book a round whose cohort was drawn in the round `drawn`, before its result is used.

        A round without a result released nothing with central privacy. With local privacy the server has seen the
        replies.
        """
        local = self.privacy.mode == "local"
        self._remember = self._remember or call.keeps
        if result is None and not local:
            return
        release = secrets.token_hex(32) if result is None else _digest(call, result)
        self.books.book(Entry(drawn, len(call.clients), call.clients if local else (), vectors, release))

    @property
    def releases(self) -> Mapping[Release, int]:
        """The uploads that are booked: by client with local privacy, and by cohort with central privacy."""
        return self.books.clients if self.privacy.mode == "local" else self.books.cohorts

    def epsilon(self, clients: int) -> float:
        """ε at δ of all that is booked, for a federation with this number of registered clients."""
        return spent_epsilon(self.privacy, self.releases, clients, self._remember)


def spent_epsilon(
    privacy: Privacy, releases: Mapping[Release, int], clients: int, remember: bool = False
) -> float:
    """ε at δ of these uploads of a federation with this number of registered clients.

    With central privacy it is the smaller one of two bounds. The first uses the amplification by cohorts, by Rényi
    accounting. The second assumes that every client was in every cohort, and is exact for that case. If clients
    remember, it is the second one: what a client uploads then depends on the cohorts that it was in, and the
    theorems on amplification do not allow that.
    """
    if not releases:
        return 0.0
    if privacy.mode == "local":
        return local_epsilon(max(releases.values()), privacy.noise, privacy.delta)
    spent = tuple(
        (clients, key.cohort, key.vectors, count)
        for key, count in sorted(releases.items())
        if isinstance(key, CohortUploads)
    )
    everywhere = local_epsilon(
        sum(vectors * count for _, _, vectors, count in spent), privacy.noise, privacy.delta
    )
    if remember or all(cohort >= clients for _, cohort, _, _ in spent):
        return everywhere
    return min(everywhere, _epsilon(spent, privacy.noise / 2, privacy.delta))


def local_epsilon(uploads: float, noise: float, delta: float) -> float:
    """ε at δ of a client that uploaded this number of vectors with the noise multiplier σ.

    Together they are one Gaussian mechanism of multiplier s = σ / (2 √uploads), whose ε is known exactly (Balle
    and Wang 2018, theorem 8). Where there is next to no noise the exact formula loses all digits, and ε is bounded
    by 1/(2s²) + √(2 log(1/δ))/s (Bun and Steinke 2016, proposition 1.3).
    """
    multiplier = noise / (2 * math.sqrt(uploads))
    if multiplier < SMALLEST:
        return 0.5 / multiplier**2 + math.sqrt(2 * math.log(1 / delta)) / multiplier
    return float(accounting().get_epsilon_gaussian(multiplier, delta))


def _digest(call: Call, result: Any) -> str:
    """A digest of a call's place and of the bits of its result."""
    made = hashlib.sha256(f"{call.step.address} {call.address}".encode())
    for name in present(result):
        value = np.asarray(getattr(result, name))
        made.update(f" {name} {value.shape} ".encode() + value.tobytes())
    return made.hexdigest()


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
    """ε of all cohorts in `spent`: registered clients, size of the cohort, uploads of each client, and count.

    An upload is a Gaussian mechanism of this multiplier: the deviation of the noise over the sensitivity.
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
