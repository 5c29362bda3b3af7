"""The books of iterations that ran inside of a program.

Rounds, uploads and the vectors that are sent for one round are the same in every run of a tape, and were booked by
the federation when the tape was traced. Vectors that clients hold are billed to those who do not have them yet,
which depends on the cohorts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..ledger import Account, Ledger
from ._watch import Bill, Cohort

EARLIER = ""  # the rounds before an iteration that is traced


@dataclass
class Entry:
    """What the rounds of one step cost in an iteration, without the vectors that clients hold."""

    rounds: int = 0
    bytes_up: int = 0
    bytes_down: int = 0


def ledger_at(rounds: int, local: int) -> Ledger:
    """A ledger in which this many rounds and local calls are booked, under a name that no step has."""
    return Ledger(steps={EARLIER: Account(rounds=rounds)}, local=local)


def entries(
    ledger: Ledger, bills: Sequence[Bill], cohorts: Mapping[Cohort | None, frozenset[int]]
) -> dict[str, Entry]:
    """What an iteration has booked in a ledger of `ledger_at`, without the vectors that clients hold."""
    held = holding(bills, cohorts)
    return {
        step: Entry(account.rounds, account.bytes_up, account.bytes_down - held.get(step, 0))
        for step, account in ledger.steps.items()
        if step != EARLIER
    }


def holding(bills: Sequence[Bill], cohorts: Mapping[Cohort | None, frozenset[int]]) -> dict[str, int]:
    """The bytes of the vectors that clients are sent to hold in an iteration, by step."""
    holders: dict[int, set[int]] = {}
    made: dict[str, int] = {}
    for step, cohort, held in bills:
        clients = cohorts[cohort]
        for version, size in held:
            there = holders.setdefault(version, set())
            made[step] = made.get(step, 0) + size * len(clients - there)
            there |= clients
    return made


class Books(list[tuple[dict[str, Entry], dict[str, int], int]]):
    """What each iteration of a block costs, to be booked when it is known which of them are sound."""

    def add(self, entries: dict[str, Entry], held: dict[str, int], local: int) -> None:
        """Add an iteration: what it costs, the bytes of vectors that clients are sent to hold, and local calls."""
        self.append((entries, held, local))

    def book(self, ledger: Ledger, iterations: int, seconds: float) -> None:
        """Book the first iterations. Their seconds are shared out over the steps by their rounds."""
        alike = Counter((id(entries), id(held)) for entries, held, _ in self[:iterations])
        pages = {(id(page[0]), id(page[1])): page for page in self[:iterations]}
        rounds = sum(entry.rounds * times for key, times in alike.items() for entry in pages[key][0].values())
        for key, times in alike.items():
            entries, held, local = pages[key]
            for step, entry in entries.items():
                account = ledger.steps.setdefault(step, Account())
                account.rounds += times * entry.rounds
                account.bytes_up += times * entry.bytes_up
                account.bytes_down += times * (entry.bytes_down + held.get(step, 0))
                account.seconds += times * seconds * entry.rounds / max(rounds, 1)
            ledger.local += times * local
