"""What a federation puts up with: how long it waits, whom it asks again, and whom it leaves out for a while."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .errors import SettingsError


@dataclass(frozen=True)
class Policies:
    """The rules of a round.

    deadline      seconds after which a reply counts for nothing; None waits for all
    retries       times that those who did not answer well are asked again within a round
    oversample    share of clients asked beyond the cohort; the first valid replies count, the others for nothing
    strikes       bad replies in a row after which a client is left out; None never does
    left_out      rounds for which it is
    """

    deadline: float | None = None
    retries: int = 0
    oversample: float = 0.0
    strikes: int | None = 3
    left_out: int = 50

    def under_privacy(self) -> Policies:
        """The rules of a private federation: who is in a cohort is so by chance alone, and all of it counts."""
        if self.oversample:
            raise SettingsError(
                f"oversample = {self.oversample:g} is wrong with privacy: who is quick would count; leave it out"
            )
        return dataclasses.replace(self, strikes=None)


@dataclass
class Conduct:
    """Who answered badly how often in a row, and who is left out until which round.

    Not to answer is no offence; to answer nonsense is. A round in which nobody answers well offends nobody: the
    fault is then the server's, such as a step that is too large.
    """

    strikes: dict[int, int] = field(default_factory=dict)
    until: dict[int, int] = field(default_factory=dict)

    def book(self, well: Iterable[int], badly: Iterable[int], rounds: int, policies: Policies) -> list[int]:
        """Book a round; return who is left out from now on."""
        for client in well:
            self.strikes.pop(client, None)
        named = []
        for client in badly:
            self.strikes[client] = self.strikes.get(client, 0) + 1
            if policies.strikes is not None and self.strikes[client] >= policies.strikes:
                del self.strikes[client]
                self.until[client] = rounds + policies.left_out
                named.append(client)
        return named

    def excluded(self, rounds: int) -> set[int]:
        """Who is left out of a cohort that is drawn now."""
        self.until = {client: until for client, until in self.until.items() if until > rounds}
        return set(self.until)

    def to_mapping(self) -> dict[str, Any]:
        """As JSON values, and `from_mapping` the way back."""
        books = {"strikes": self.strikes, "until": self.until}
        return {name: {str(client): n for client, n in book.items()} for name, book in books.items() if book}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Conduct:
        return cls(*({int(client): n for client, n in values.get(k, {}).items()} for k in ("strikes", "until")))
