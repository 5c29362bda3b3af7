"""How the clients of a run are: which of them answer, which do not, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from ..errors import one_line
from ..record import SILENT, Glance


class State(Enum):
    """How a client is, from ill to well."""

    SILENT = "silent"  # several of its replies in a row, up to the last, were not used
    EXCLUDED = "left out"  # it answered badly again and again, and is not asked for some rounds
    FALTERING = "faltering"  # its last reply was not used, or one since the last checkpoint
    RECOVERED = "well again"  # replies were refused, and it has answered since
    WELL = "well"

    @property
    def is_ill(self) -> bool:
        """Whether the run goes on without the client."""
        return self in (State.SILENT, State.EXCLUDED)


@dataclass(frozen=True)
class Patient:
    """A client that is not well, or was not.

    client    its number, as the ledger has it
    name      the name of its site, or "client 3"
    refused   how many of its replies were not used
    why       what is known of the reason
    said      what it said itself when it could not do a step
    """

    client: str
    name: str
    state: State
    refused: int
    why: str
    said: str


@dataclass(frozen=True)
class Clinic:
    """The clients of a run: how many there are, if that is known, and those of which there is something to say."""

    count: int | None
    patients: tuple[Patient, ...]

    @property
    def ill(self) -> int:
        return sum(each.state.is_ill for each in self.patients)

    @property
    def faltering(self) -> int:
        return sum(each.state is State.FALTERING for each in self.patients)


def clinic_of(look: Glance) -> Clinic:
    """The clients of a run. The books say it as of a checkpoint, and the last evaluation may know more."""
    books = look.books
    rounds = look.history[-1]["rounds"] if look.history else 0
    booked: Counter[str] = Counter()
    reasons: dict[str, Counter[str]] = {}
    for clients in books.get("rejected", {}).values():
        for client, counts in clients.items():
            booked[client] += sum(counts.values())
            reasons.setdefault(client, Counter()).update(counts)
    latest = booked | Counter(_refused_by_client(look))
    silent = {client: each for client, each in books.get("silent", {}).items() if len(each) == 3}
    until = {str(each["client"]): each["until"] for each in books.get("exclusions", ())}
    found = []
    for client in latest.keys() | silent.keys() | until.keys():
        new = latest[client] - booked[client]
        since, replies, last = silent.get(client, (0, 0, ""))
        usual = reasons[client].most_common(1)[0][0] if client in reasons else ""
        if until.get(client, 0) > rounds:
            state, why = State.EXCLUDED, f"not asked until round {until[client]:,}; {usual}"
        elif isinstance(replies, int) and replies >= SILENT:
            state, why = State.SILENT, f"no valid reply since round {since}: {replies} not used; {last}"
        elif new or replies:
            state, why = State.FALTERING, str(last or usual or "not used since the last checkpoint")
        else:
            state, why = State.RECOVERED, usual
        said = "; ".join(map(str, books.get("said", {}).get(client, ())))
        found.append(
            Patient(
                client=one_line(client, 20),
                name=_name(look, client),
                state=state,
                refused=latest[client],
                why=one_line(why.removesuffix("; "), 160),
                said=one_line(said, 200),
            )
        )
    order = list(State)
    found.sort(key=lambda each: (order.index(each.state), -each.refused, each.client.zfill(20)))
    return Clinic(_count(look), tuple(found))


def _refused_by_client(look: Glance) -> dict[str, int]:
    """The replies of each client that were not used, as the last evaluation counts them."""
    told = look.history[-1].get("rejected") if look.history else None
    counts: Any = told.get("client") if isinstance(told, Mapping) else None
    if not isinstance(counts, Mapping):
        return {}
    return {client: n for client, n in counts.items() if type(n) is int and n > 0}


def _count(look: Glance) -> int | None:
    if look.federation is not None:
        return len(look.federation["sites"])
    data = look.settings.get("data")
    clients = data.get("clients") if isinstance(data, Mapping) else None
    return clients if type(clients) is int and clients > 0 else None


def _name(look: Glance, client: str) -> str:
    sites = () if look.federation is None else look.federation["sites"]
    if client.isascii() and client.isdigit() and len(client) < 10 and int(client) < len(sites):
        return one_line(sites[int(client)], 60)
    return f"client {one_line(client, 20)}"
