"""The books of a federation. Only the federation writes into them."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from .engines import Reason
from .policies import Conduct

By = Literal["reason", "client"]
BY: tuple[By, ...] = ("reason", "client")
REASONS = 16  # A client's further reasons in a step are counted by their fault alone.
SAID = 3  # The ledger keeps this many texts that a client wrote itself.


class Event(NamedTuple):
    """An event of a client's reply in a step, such as the reason why it was rejected."""

    client: int
    step: str
    what: str


class Exclusion(NamedTuple):
    """A client that is excluded from one round until another."""

    client: int
    round: int
    until: int


class Silence(NamedTuple):
    """A client without a valid reply since a round: how many replies were not used, and why the last was not."""

    round: int
    replies: int
    reason: str


@dataclass
class Account:
    """What the rounds of one step cost. Bytes are payload: vectors, without headers and scalars.

    `wire_up` and `wire_down` are the bytes of whole messages, as measured by an engine that sends messages.
    `retries` counts the clients asked again, and `surplus` the replies that came after enough others.
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
        """The account as JSON values. The entries that most rounds do not have are omitted if they are zero."""
        values = dataclasses.asdict(self)
        return {k: v for k, v in values.items() if v or k not in ("wire_up", "wire_down", "retries", "surplus")}


@dataclass
class Ledger:
    """Rounds, payload bytes and seconds by the name of the step. Probes are booked separately.

    rejected     the number of replies that were not used, by client, step and reason
    said         the first few texts of each client that could not do a step, in its own words
    injected     the number of injected faults, in the same way
    exclusions   the clients that were excluded
    conduct      the clients that are excluded or close to it
    local        the number of calls in which clients worked locally
    keepers      the remote clients that keep a state, with its clock, so that a loss can be noticed
    forgotten    how often each of those clients lost its state
    silent       the clients that were asked and have given no valid reply since
    """

    steps: dict[str, Account] = field(default_factory=dict)
    probes: dict[str, Account] = field(default_factory=dict)
    rejected: Counter[Event] = field(default_factory=Counter)
    injected: Counter[Event] = field(default_factory=Counter)
    exclusions: list[Exclusion] = field(default_factory=list)
    conduct: Conduct = field(default_factory=Conduct)
    local: int = 0
    keepers: dict[int, int] = field(default_factory=dict)
    forgotten: Counter[int] = field(default_factory=Counter)
    said: dict[int, list[str]] = field(default_factory=dict)
    silent: dict[int, Silence] = field(default_factory=dict)
    _reasons: Counter[tuple[int, str]] = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        self._reasons = Counter((event.client, event.step) for event in self.rejected)

    def reject(self, client: int, step: str, reason: Reason) -> None:
        """Count a reply that is not used. However inventive a client is, it has a bounded number of entries."""
        event = Event(client, step, reason.text)
        if event not in self.rejected:
            if self._reasons[client, step] >= REASONS:
                event = Event(client, step, reason.fault.value)
            else:
                self._reasons[client, step] += 1
        self.rejected[event] += 1
        said = self.said.get(client, [])
        if reason.said and reason.said not in said and len(said) < SAID:
            self.said[client] = [*said, reason.said]

    def hear(self, well: Iterable[int], reasons: Mapping[int, Reason]) -> None:
        """Note, after a round, which clients gave a valid reply and which did not."""
        well = set(well)
        for client in self.silent.keys() & well:
            del self.silent[client]
        for client, reason in reasons.items():
            if client not in well:
                since, replies, _ = self.silent.get(client, (self.rounds - 1, 0, ""))
                self.silent[client] = Silence(since, replies + 1, reason.text)

    @property
    def rounds(self) -> int:
        """The rounds of all steps."""
        return sum(a.rounds for a in self.steps.values())

    @property
    def clock(self) -> int:
        """The number of calls that the algorithm has made: rounds, and work without communication."""
        return self.rounds + self.local

    @property
    def bytes_up(self) -> int:
        """The bytes that clients have sent, in all steps."""
        return sum(a.bytes_up for a in self.steps.values())

    @property
    def bytes_down(self) -> int:
        """The bytes that clients were sent, in all steps."""
        return sum(a.bytes_down for a in self.steps.values())

    @property
    def seconds(self) -> float:
        """The seconds of all steps."""
        return sum(a.seconds for a in self.steps.values())

    def to_mapping(self) -> dict[str, Any]:
        """The ledger as JSON values; the inverse is `from_mapping`."""
        books = {"steps": self.steps, "probes": self.probes}
        mapping: dict[str, Any] = {
            book: {name: a.to_mapping() for name, a in accounts.items()} for book, accounts in books.items()
        }
        seldom = {
            "said": {str(client): texts for client, texts in self.said.items()},
            "injected": _nested(self.injected),
            "exclusions": [each._asdict() for each in self.exclusions],
            "conduct": self.conduct.to_mapping(),
            "local": self.local,
            "keepers": {str(client): clock for client, clock in self.keepers.items()},
            "forgotten": {str(client): count for client, count in self.forgotten.items()},
            "silent": {str(client): list(each) for client, each in self.silent.items()},
        }
        return {**mapping, "rejected": _nested(self.rejected), **{k: v for k, v in seldom.items() if v}}

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> Ledger:
        """The ledger that `to_mapping` gave."""
        steps, probes = ({name: Account(**a) for name, a in values[book].items()} for book in ("steps", "probes"))
        return cls(
            steps,
            probes,
            Counter(dict(_events(values["rejected"]))),
            Counter(dict(_events(values.get("injected", {})))),
            [Exclusion(**each) for each in values.get("exclusions", [])],
            Conduct.from_mapping(values.get("conduct", {})),
            values.get("local", 0),
            {int(client): clock for client, clock in values.get("keepers", {}).items()},
            Counter({int(client): count for client, count in values.get("forgotten", {}).items()}),
            {int(client): list(texts) for client, texts in values.get("said", {}).items()},
            {int(client): Silence(*each) for client, each in values.get("silent", {}).items()},
        )


def _nested(events: Mapping[Event, int]) -> dict[str, Any]:
    """Counts of events as JSON values: by step, then by client, then by event."""
    made: dict[str, Any] = {}
    for event, count in events.items():
        made.setdefault(event.step, {}).setdefault(str(event.client), {})[event.what] = count
    return made


def _events(nested: Mapping[str, Any]) -> Iterable[tuple[Event, int]]:
    for step, clients in nested.items():
        for client, counts in clients.items():
            for what, count in counts.items():
                yield Event(int(client), step, what), count


def counted(events: Mapping[Event, int], by: By) -> dict[str, int]:
    """Counts such as `rejected`, summed by client or by reason."""
    found: Counter[str] = Counter()
    for event, count in events.items():
        found[str(event.client) if by == "client" else event.what] += count
    return dict(found)
