"""The books of a federation. Only the federation writes into them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from .policies import Conduct

By = Literal["reason", "client"]
BY: tuple[By, ...] = ("reason", "client")


@dataclass
class Account:
    """What the rounds of one step cost. Bytes are payload: vectors, without headers and scalars.

    `wire_up` and `wire_down` are the bytes of whole messages, as measured by an engine that sends them; `retries`
    the clients asked again, `surplus` the replies that came after enough others.
    """

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0
    seconds: float = 0.0
    rejected: int = 0
    wire_up: int = 0
    wire_down: int = 0
    retries: int = 0
    surplus: int = 0

    def to_mapping(self) -> dict[str, Any]:
        """The account as JSON values; without what few rounds have, where there is none of it."""
        values = dataclasses.asdict(self)
        return {k: v for k, v in values.items() if v or k not in ("wire_up", "wire_down", "retries", "surplus")}


@dataclass
class Ledger:
    """Rounds, payload bytes and seconds by the name of the step; probes are booked apart.

    `rejected` counts the replies that were not used, by client, step and reason; `injected` the faults made on
    purpose, in the same way; `releases` what privacy is charged for. `left_out` names who was left out,
    and `conduct` who is near to it.
    """

    steps: dict[str, Account] = field(default_factory=dict)
    probes: dict[str, Account] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)
    injected: Counter[str] = field(default_factory=Counter)
    releases: Counter[str] = field(default_factory=Counter)
    left_out: list[dict[str, int]] = field(default_factory=list)
    conduct: Conduct = field(default_factory=Conduct)

    @property
    def rounds(self) -> int:
        return sum(a.rounds for a in self.steps.values())

    @property
    def bytes_up(self) -> int:
        return sum(a.bytes_up for a in self.steps.values())

    @property
    def bytes_down(self) -> int:
        return sum(a.bytes_down for a in self.steps.values())

    @property
    def seconds(self) -> float:
        return sum(a.seconds for a in self.steps.values())

    def to_mapping(self) -> dict[str, Any]:
        """The ledger as JSON values, and `from_mapping` the way back."""
        books = {"steps": self.steps, "probes": self.probes}
        mapping: dict[str, Any] = {
            book: {name: a.to_mapping() for name, a in accounts.items()} for book, accounts in books.items()
        }
        seldom = {
            "injected": dict(self.injected),
            "releases": dict(self.releases),
            "left_out": self.left_out,
            "conduct": self.conduct.to_mapping(),
        }
        return {**mapping, "rejected": dict(self.rejected), **{k: v for k, v in seldom.items() if v}}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Ledger:
        steps, probes = ({name: Account(**a) for name, a in values[book].items()} for book in ("steps", "probes"))
        return cls(
            steps,
            probes,
            Counter(values["rejected"]),
            Counter(values.get("injected", {})),
            Counter(values.get("releases", {})),
            list(values.get("left_out", [])),
            Conduct.from_mapping(values.get("conduct", {})),
        )


def counted(books: Mapping[str, int], by: By) -> dict[str, int]:
    """Counts such as `rejected`, whose keys are "client 3: lower_steps: no answer", by client or by reason."""
    found: Counter[str] = Counter()
    for key, count in books.items():
        client, _, reason = key.split(": ", 2)
        found[client.removeprefix("client ") if by == "client" else reason] += count
    return dict(found)
