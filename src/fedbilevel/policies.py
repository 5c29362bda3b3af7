"""The policies of a federation: how long it waits, which clients it asks again, and which it excludes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import SettingsError


@dataclass(frozen=True)
class Policies:
    """The rules of a round.

    deadline           seconds after which a reply is not used; None waits for all replies
    retries            how often clients without a valid reply are asked again within a round
    oversample         how many more clients are asked, as a share of the cohort; only the first valid replies are
                       used
    strikes            bad replies in a row after which a client is excluded; None never excludes a client
    exclusion_rounds   for how many rounds it is excluded
    """

    deadline: float | None = None
    retries: int = 0
    oversample: float = 0.0
    strikes: int | None = 3
    exclusion_rounds: int = 50

    def under_privacy(self) -> Policies:
        """The rules of a private federation, where chance alone decides whose replies count."""
        if self.oversample:
            raise SettingsError(
                f"oversample = {self.oversample:g} is wrong with privacy: only fast replies would count; use 0"
            )
        return dataclasses.replace(self, strikes=None)


@dataclass
class Conduct:
    """How often each client answered badly in a row, and until which round clients are excluded.

    An invalid reply is an offence, and no reply is not. A round without a single valid reply counts against no
    client, because the fault is then the server's, such as a step size that is too large.
    """

    strikes: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)

    def book(self, well: Iterable[int], badly: Iterable[int], rounds: int, policies: Policies) -> list[int]:
        """Book a round; return the clients that are excluded from now on."""
        for client in well:
            self.strikes.pop(client, None)
        named = []
        for client in badly:
            self.strikes[client] = self.strikes.get(client, 0) + 1
            if policies.strikes is not None and self.strikes[client] >= policies.strikes:
                del self.strikes[client]
                self.until[client] = rounds + policies.exclusion_rounds
                named.append(client)
        return named

    def excluded(self, rounds: int) -> set[int]:
        """The clients that a cohort drawn now must not contain."""
        self.until = {client: until for client, until in self.until.items() if until > rounds}
        return set(self.until)

    def to_mapping(self) -> dict[str, Any]:
        """The conduct as JSON values; the inverse is `from_mapping`."""
        books = {"strikes": self.strikes, "until": self.until}
        return {name: {str(client): n for client, n in book.items()} for name, book in books.items() if book}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Conduct:
        return cls(*({int(client): n for client, n in values.get(k, {}).items()} for k in ("strikes", "until")))
