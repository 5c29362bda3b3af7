"""The replies of clients, and the reasons why a reply does not count."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, NamedTuple

import jax

from ..errors import one_line
from ..rng import Address

SHOWN = 120  # the largest number of characters of a text that is kept and shown


class Fault(Enum):
    """What is wrong with a reply that does not count."""

    ABSENT = "absent"  # there is no reply
    LATE = "late"  # it came after the deadline
    FAILED = "failed"  # the client says that it could not do the step
    MALFORMED = "malformed"  # it is not a message, or not one that the step can be answered with
    STALE = "stale"  # it answers another call
    TWICE = "twice"  # the client has answered already
    MISFIT = "misfit"  # it has other fields, shapes or types than the step returns
    NOT_FINITE = "not finite"
    TOO_LARGE = "too large"

    @property
    def offence(self) -> bool:
        """Whether the fault counts against the client. An absent or late reply does not."""
        return self not in (Fault.ABSENT, Fault.LATE)

    @property
    def wild(self) -> bool:
        """Whether the fault is a sign of divergence."""
        return self in (Fault.NOT_FINITE, Fault.TOO_LARGE)


@dataclass(frozen=True)
class Reason:
    """Why a reply does not count.

    text   what is wrong, in words of this library or of the engine; it is what the ledger counts by
    field  the field at fault, if there is a single one
    said   what the client itself wrote, which may be anything; it is shown, but nothing is counted by it

    Both texts are made printable and short, wherever they come from.
    """

    fault: Fault
    text: str
    field: str | None = None
    said: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "text", one_line(self.text, SHOWN))
        object.__setattr__(self, "said", one_line(self.said, SHOWN))

    def __str__(self) -> str:
        return f"{self.text}: {self.said}" if self.said else self.text


class Averaged(NamedTuple):
    """The mean of stacked replies, made by the program that made them, and whether every number is finite.

    Without the latter the mean says nothing, and the replies have to be looked at one by one.
    """

    sound: Any
    value: Any


@dataclass(frozen=True, kw_only=True)
class Replies:
    """The replies of some clients of the cohort, stacked along the first axis.

    refused   the clients whose reply the engine itself could not accept, each with the reason
    wire      the bytes of the messages up and down with their headers, if the engine sends messages
    delay     seconds that these replies took, if the engine leaves the deadline to the federation
    address   the address of the call that they answer; None if the engine itself ensures that it is this call
    injected  the faults that were injected, by client
    forgot    the clients that report that they have lost their state and started afresh
    sound     whether it is known already that every number is finite
    mean      the mean of these replies, if the engine was asked for it; they are then all replies of the round
    """

    clients: tuple[int, ...] = ()
    reply: Any = None
    refused: Mapping[int, Reason] = field(default_factory=dict)
    wire: tuple[int, int] = (0, 0)
    delay: float = 0.0
    address: Address | None = None
    injected: Mapping[int, str] = field(default_factory=dict)
    forgot: tuple[int, ...] = ()
    sound: bool = False
    mean: Averaged | None = None

    def split(self, count: int) -> tuple[Replies, Replies]:
        """Split into the first `count` replies and the others."""
        if count >= len(self.clients):
            return self, Replies()
        first, rest = (
            replace(
                self,
                clients=self.clients[part],
                reply=jax.tree.map(operator.itemgetter(part), self.reply),
                mean=None,
            )
            for part in (slice(count), slice(count, None))
        )
        return first, rest
