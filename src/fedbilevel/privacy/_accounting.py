"""The accounting of a private federation: uploads are booked in the ledger, and epsilon is computed from it.

The uploads of one outer iteration come from one cohort. Given the cohort, k vectors with the sensitivity 2C and
the noise σ C each are one Gaussian mechanism of multiplier σ / (2 √k), also when each depends on those before it
(Dong, Roth and Su 2022, on composing Gaussian mechanisms). The cohort is drawn once for all k, as a fixed number
of clients without replacement: its amplification applies to the k together and not to each (Wang, Balle and
Kasiviswanathan 2019, theorem 27). Cohorts compose. Against a server that sees replies there is no amplification:
local privacy is charged every upload of the client that sent the most.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from functools import lru_cache
from types import ModuleType
from typing import Any, NamedTuple

from ..errors import SettingsError
from ._settings import Privacy

FINE = tuple(n / 2 for n in range(4, 11))
ORDERS = (1.1, 1.25, 1.5, *FINE, 6, 7, 8, 9, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128)


class CohortUploads(NamedTuple):
    """Central privacy: the number of clients drawn together, and the number of vectors that each uploaded."""

    cohort: int
    vectors: int


class ClientUploads(NamedTuple):
    """Local privacy: one client, which is charged for each of its uploads."""

    client: int


Release = CohortUploads | ClientUploads


class Accountant:
    """Books the uploads of a private federation, and computes the epsilon that they have spent."""

    def __init__(self, privacy: Privacy) -> None:
        accounting()  # raises if the library is missing, before anything is uploaded
        self.privacy = privacy

    def book(self, releases: Counter[Release], clients: tuple[int, ...], before: int, uploads: int) -> None:
        """Book the uploads of one round of a cohort, whose clients have uploaded `before` vectors already.

        Central privacy counts cohorts, by their size and the number of vectors that each client uploaded. Local
        privacy counts the vectors that each client uploaded.
        """
        if self.privacy.mode == "local":
            releases.update({ClientUploads(client): uploads for client in clients})
            return
        if before:
            releases[CohortUploads(len(clients), before)] -= 1
        releases[CohortUploads(len(clients), before + uploads)] += 1
        for key in [key for key, count in releases.items() if count == 0]:
            del releases[key]

    def epsilon(self, releases: Mapping[Release, int], clients: int) -> float:
        """ε at δ for the booked uploads of a federation with this number of registered clients."""
        if not releases:
            return 0.0
        if self.privacy.mode == "local":
            return local_epsilon(max(releases.values()), self.privacy.noise, self.privacy.delta)
        spent = tuple(
            (clients, key.cohort, key.vectors, count)
            for key, count in sorted(releases.items())
            if isinstance(key, CohortUploads)
        )
        return _epsilon(spent, self.privacy.noise / 2, self.privacy.delta)


def local_epsilon(uploads: int, noise: float, delta: float) -> float:
    """ε at δ of a client that uploaded this number of vectors with the noise multiplier σ."""
    return _epsilon(((1, 1, uploads, 1),), noise / 2, delta)


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
