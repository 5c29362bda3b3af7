"""The collection of replies: one call is sent, valid replies are aggregated, and the others are counted."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from .aggregate import Accumulator, Mean, finite_mean
from .data import Clients
from .engines import Averaging, Call, Engine, Expected, Fault, Reason, Replies, expect, payload
from .errors import Diverged, SettingsError, TooFewReplies
from .ledger import Account, Event, Exclusion, Ledger
from .policies import Policies
from .rng import Kind
from .steps import Form, PerClient

Weighting = Literal["uniform", "samples"]
NAMED = 3  # An error spells out the reasons of this many clients.


@dataclass
class Collection:
    """One call to a cohort, and its replies so far.

    averaging the engine, if it can take the mean itself
    wanted    the number of valid replies that is enough
    fewest    the number of valid replies that is needed
    """

    engine: Engine
    averaging: Averaging | None
    call: Call
    gathered: Accumulator
    policies: Policies
    weighting: Weighting
    ledger: Ledger
    account: Account
    wanted: int
    fewest: int
    well: set[int] = field(default_factory=set)  # the clients whose replies count
    badly: set[int] = field(default_factory=set)  # the clients that committed an offence
    reasons: dict[int, Reason] = field(default_factory=dict)
    weighed: tuple[tuple[int, ...], np.ndarray] | None = None  # clients and their weights

    def __post_init__(self) -> None:
        self.expected: Expected = expect(self.call, self.engine.problem)

    def collect(self) -> Any:
        """Ask the cohort, and ask clients without a valid reply again if the policies say so."""
        start = time.perf_counter()
        for attempt in range(self.policies.retries + 1):
            asked = tuple(c for c in self.call.clients if c not in self.well)
            if attempt and (not asked or self.gathered.count >= self.wanted):
                break
            self._ask(self.call.again(asked, attempt) if attempt else self.call)
            self.account.retries += len(asked) if attempt else 0
        self.account.rounds += 1
        self.account.seconds += time.perf_counter() - start
        if self.call.kind is Kind.ROUND and (self.reasons or self.ledger.silent):
            self.ledger.hear(self.well, self.reasons)
        if self.gathered.count < self.fewest:
            raise complaint(self.call, self.gathered.count, self.fewest, self.reasons)
        self._judge()
        return self.gathered.value

    def _ask(self, call: Call) -> None:
        """Run the step on the clients of a call, and aggregate the valid replies."""
        account, ledger = self.account, self.ledger
        account.bytes_down += len(call.clients) * payload(call.arrays)
        account.bytes_down += sum(len(h.missing) * payload(h.value) for h in call.held.values() if h.missing)
        account.bytes_down += sum(_row_bytes(each, c) for each in call.rows.values() for c in call.clients)
        name = call.step.name
        for replies in self._replies(call):
            account.wire_up += replies.wire[0]
            account.wire_down += replies.wire[1]
            account.bytes_up += sum(_nbytes(a) for a in jax.tree.leaves(replies.reply) if a.ndim > 1)
            if replies.injected:
                ledger.injected.update(Event(c, name, kind) for c, kind in replies.injected.items())
            if replies.forgot:
                ledger.forgotten.update(replies.forgot)
            refused = dict(replies.refused)
            why = self._refusal(call, replies)
            refused |= dict.fromkeys(replies.clients, why) if why else dict(self._gather(replies))
            self.badly.update(client for client, reason in refused.items() if reason.fault.offence)
            account.rejected += len(refused)
            for client, reason in refused.items():
                ledger.reject(client, name, reason)
            self.reasons.update(refused)

    def _replies(self, call: Call) -> Iterable[Replies]:
        """The replies to a call, with their mean if nothing else is to be made of them and the engine can."""
        alone = call.attempt == 0 and len(call.clients) <= self.wanted  # whether these are all replies
        if self.averaging is not None and alone and isinstance(self.gathered, Mean):
            replies = self.averaging.average(call, self._weights(call.clients), finite_mean)
            if replies is not None:
                return (replies,)
        return self.engine.replies(call)

    def _weights(self, clients: tuple[int, ...]) -> np.ndarray:
        """The weights of clients. Those of the last ones that were asked for are known."""
        if self.weighed is None or self.weighed[0] != clients:
            self.weighed = clients, weights_of(clients, self.engine.clients, self.weighting)
        return self.weighed[1]

    def _gather(self, replies: Replies) -> Iterator[tuple[int, Reason]]:
        """Add valid replies until there are enough; yield the clients with invalid replies and the reasons."""
        while replies.clients and self.gathered.count < self.wanted:
            part, replies = replies.split(self.wanted - self.gathered.count)
            rejected = self.gathered.add(part, self._weights(part.clients))
            self.well.update(part.clients)
            self.well.difference_update(rejected)
            yield from rejected.items()
        self.account.surplus += len(replies.clients)

    def _refusal(self, call: Call, replies: Replies) -> Reason | None:
        """The reason why replies are not used, or None."""
        if not replies.clients:
            return None
        if self.policies.deadline is not None and replies.delay > self.policies.deadline:
            return Reason(Fault.LATE, f"late: after {self.policies.deadline:g} s")
        if replies.address is not None and replies.address != call.address:
            return Reason(Fault.STALE, f"a reply to {replies.address}")
        if not self.well.isdisjoint(replies.clients):
            return Reason(Fault.TWICE, "answered twice")
        return misfit(call, replies, self.expected)

    def _judge(self) -> None:
        """Exclude for a while the clients that answered badly too often in a row."""
        if self.call.kind is not Kind.ROUND or not (self.badly or self.ledger.conduct.strikes):
            return
        rounds = self.ledger.rounds
        named = self.ledger.conduct.book(self.well, self.badly - self.well, rounds, self.policies)
        until = rounds + self.policies.exclusion_rounds
        self.ledger.exclusions += [Exclusion(client, rounds, until) for client in named]


def weights_of(clients: Sequence[int], registered: Clients, weighting: Weighting) -> np.ndarray:
    """The weights of clients in the mean: all equal, or their numbers of rows."""
    if weighting == "uniform":
        return np.ones(len(clients), np.float32)
    rows = {client: sum(registered.size(client)) for client in clients}
    unknown = [client for client, count in rows.items() if count == 0]
    if unknown:
        raise SettingsError(
            f"client {unknown[0]} does not tell how many rows it has, so it cannot be weighed; "
            "use the weighting 'uniform'"
        )
    return np.asarray(list(rows.values()), np.float32)


def _nbytes(a: Any) -> int:
    """The bytes of an array. JAX's own property takes several times as long."""
    return math.prod(a.shape) * int(a.dtype.itemsize)


def _row_bytes(rows: PerClient, client: int) -> int:
    """The payload bytes of a client's own row, which is sent as float32. A single number is not payload."""
    row = np.asarray(rows.values[client])
    return 4 * row.size if row.ndim else 0


def misfit(call: Call, replies: Replies, expected: Expected) -> Reason | None:
    """The reason why stacked replies do not have the fields, shapes and types that the step returns, or None."""
    fields = replies.reply._asdict() if hasattr(replies.reply, "_asdict") else {}
    if fields.keys() != call.step.reply.keys():
        return Reason(Fault.MISFIT, f"fields {sorted(fields)} instead of {sorted(call.step.reply)}")
    there = {name: value for name, value in fields.items() if value is not None}
    if there.keys() != expected.fields.keys():
        return Reason(Fault.MISFIT, f"values for {sorted(there)} instead of {sorted(expected.fields)}")
    for name, value in there.items():
        stack = call.step.reply[name].form is Form.YY and not call.even  # a stack of any number of matrices
        shape, wanted = value.shape[1:], expected.fields[name]
        if (shape[1:], len(shape)) != (wanted[1:], len(wanted)) if stack else shape != wanted:
            return Reason(Fault.MISFIT, f"{name} has shape {shape} instead of {wanted}", name)
        if value.dtype != jnp.float32:
            return Reason(Fault.MISFIT, f"{name} has type {value.dtype} instead of float32", name)
    return None


def complaint(call: Call, got: int, needed: int, reasons: Mapping[int, Reason]) -> TooFewReplies:
    """The error of a call without enough valid replies: divergence, if most of them are not finite.

    In the first call of a run, only the `Next` fields depend on a step size. If another field is not finite, the
    fault is in the data or in the losses.
    """
    text = f"{call}: {got} valid replies of {len(call.clients)}, {needed} needed"
    text += "".join(f"; client {c}: {why}" for c, why in list(reasons.items())[:NAMED])
    text += f"; and {len(reasons) - NAMED} more" if len(reasons) > NAMED else ""
    wild = [why.field for why in reasons.values() if why.fault.wild and why.field is not None]
    if 2 * len(wild) <= len(reasons) or not wild:
        return TooFewReplies(text)
    numbers = {k: float(v) for k, v in call.arrays.items() if np.ndim(v) == 0}
    at_start = call.clock == 0 and not any(name in call.before for name in wild)
    if at_start:
        text += (
            ", at the start, where no step size matters; look for labels out of range and numbers that are not "
            "finite in the data, and at the losses there"
        )
    return Diverged(text, dict.fromkeys(wild), numbers, moved=call.step.reply[wild[0]].moved, at_start=at_start)
