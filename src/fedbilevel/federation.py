"""The federation: the only code that counts rounds and bytes.

One call of `round` is one communication round: vectors go down to the cohort, a client step runs on each, the
mean of the valid replies comes back. `2N+3` comes out of the ledger; nobody writes it down.
"""

from __future__ import annotations

import copy
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from . import rng
from .aggregate import Accumulator, Mean, Rows, Rule, mix, not_finite, present
from .engines.base import Call, Engine, Held, Replies
from .errors import Diverged, SettingsError, TooFewReplies
from .ledger import Account, Ledger
from .policies import Policies
from .privacy import NoisyReplies, NoisySum, Privacy, accounting
from .steps import Descriptor, PerClient, Step

R = TypeVar("R", bound=tuple[Any, ...])
Weighting = Literal["uniform", "samples"]

# Versions of held vectors. They never repeat, so federations that share an engine do not take one another's.
_versions = itertools.count()


@dataclass
class _Shelf:
    """What the server has given out to hold, and which clients have it."""

    version: int
    value: Array
    holders: set[int]


@dataclass
class _Round:
    """What came of a round so far: whose replies count, who answered badly, and why others do not count."""

    gathered: Accumulator
    wanted: int
    well: set[int] = field(default_factory=set)
    badly: set[int] = field(default_factory=set)
    reasons: dict[int, str] = field(default_factory=dict)


class Federation:
    """A server's view of its clients.

    engine       what runs the clients
    seed         the root of every random address: cohorts, samples, the algorithm's own choices
    min_replies  a round with fewer valid replies raises `TooFewReplies`; a float is a share of those asked
    policies     what else is put up with: deadline, retries, more clients asked than needed, who is left out
    weighting    the mean over clients is uniform, as in the paper, or by the number of their samples
    aggregator   the rule that puts the replies of a round together; the mean when left out
    privacy      differential privacy of what clients upload; none when left out
    ledger       the books to go on with, when a run is resumed
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: int = 0,
        min_replies: int | float = 1,
        policies: Policies | None = None,
        weighting: Weighting = "uniform",
        aggregator: Rule | None = None,
        privacy: Privacy | None = None,
        ledger: Ledger | None = None,
    ) -> None:
        self.engine, self.seed = engine, seed
        self.privacy: Privacy | None = None
        self._policies = policies or Policies()
        if privacy is not None and privacy.mode is not None:
            privacy.check(weighting, aggregator)
            accounting()
            self.privacy, self._policies = privacy, self._policies.under_privacy()
            if privacy.mode == "local" and not getattr(engine, "noisy", False):  # else clients add their own
                self.engine = NoisyReplies(engine, privacy)
        self.ledger = Ledger() if ledger is None else ledger
        self.clients: Sequence[int] = range(engine.clients.count)  # not a tuple: a million of them cost nothing
        self._min_replies, self._weighting, self._aggregator = min_replies, weighting, aggregator
        self._wanted: int | None = None  # replies that are enough; all when there is no number
        self._shelves: dict[str, _Shelf] = {}
        self._uploads = 0  # vectors that a client of this cohort has uploaded

    def cohort(self, participation: int | float) -> Federation:
        """This federation with a random part of its clients: a number of them, or a share as a float.

        It shares the ledger and what clients hold. The choice is drawn at (seed, "cohort", rounds so far).
        """
        count = cohort_size(participation, len(self.clients))
        view = copy.copy(self)
        view._uploads = 0
        out = self.ledger.conduct.excluded(self.ledger.rounds)
        asked = count if self._policies.oversample == 0 else math.ceil(count * (1 + self._policies.oversample))
        drawn = min(asked + len(out), len(self.clients))
        if drawn < len(self.clients) or out:
            chosen = self.rng("cohort").choice(len(self.clients), drawn, replace=False)
            there = [self.clients[i] for i in chosen if self.clients[i] not in out]
            view.clients = tuple(sorted(there[:asked])) or self.clients
        view._wanted = count if self._policies.oversample else None
        return view

    def rng(self, name: str) -> np.random.Generator:
        """The server's randomness for a purpose, at (seed, name, rounds so far)."""
        return rng.generator(self.seed, name, self.ledger.rounds)

    def hold(self, **vectors: Array) -> None:
        """Give clients vectors to keep. They ride on the next round a client is in, once for each client."""
        for name, value in vectors.items():
            self._shelves[name] = _Shelf(next(_versions), value, set())

    def release(self, *names: str) -> None:
        """Let clients forget vectors that they hold; it costs nothing."""
        for name in names:
            del self._shelves[name]

    def round(self, step: Step[Any, R], **arguments: Any) -> R:
        """One communication round: run `step` on the cohort and return the mean of the valid replies.

        With another aggregator it is that rule's value. The rule sees each field on its own; for a field that is
        the next value of a vector that the clients were given it sees the differences to it.

        Arrays are sent down and billed. `Sample`, `Samples` and `Epochs` are drawn by each client;
        `PerClient` gives each its own value; numbers and flags are settings of the step.
        """
        held = {
            name: Held(shelf.version, shelf.value, tuple(c for c in self.clients if c not in shelf.holders))
            for name, shelf in self._shelves.items()
        }
        call = _call(step, (self.seed, "round", self.ledger.rounds), self.clients, held, arguments)
        account = self.ledger.steps.setdefault(step.name, Account())
        gathered = self._accumulator(call)
        try:
            return self._exchange(call, account, gathered)
        finally:
            if self.privacy is not None:
                uploads = len(gathered.fields or ())
                self.privacy.book(self.ledger.releases, call.clients, self._uploads, uploads)
                self._uploads += uploads

    def each(self, step: Step[Any, R], **arguments: Any) -> R:
        """Run `step` on every client and keep the replies apart, one row each: work without communication.

        For methods without a server. A reply that is not valid raises, as nobody else can stand in for it.
        """
        call = _call(step, (self.seed, "round", self.ledger.rounds), self.clients, {}, arguments, local=True)
        account = self.ledger.steps.setdefault(step.name, Account())
        start = time.perf_counter()
        rows: list[Any] = []
        for replies in self.engine.replies(call):
            missing = {**replies.absent, **replies.failures}
            wrong = next(iter(missing.values()), None) or self._misfit(call, replies, None)
            reasons = dict.fromkeys(replies.clients, wrong) if wrong else not_finite(replies)
            if reasons:
                raise _complaint(call, len(rows), len(call.clients), reasons)
            rows.append(replies.reply)
        account.seconds += time.perf_counter() - start
        return rows[0] if len(rows) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *rows)

    def exchange(self, name: str, weights: np.ndarray, **rows: Array) -> dict[str, Array]:
        """One round of gossip: client i sends its rows to its neighbours and mixes: v_i ← Σ_j w_ij v_j.

        Booked under `name` as one round; each vector is billed once for every neighbour it goes to.
        """
        if self.privacy is not None or self._aggregator is not None:
            raise SettingsError(f"{name}: gossip has no server; leave out aggregator and privacy")
        start = time.perf_counter()
        account = self.ledger.steps.setdefault(name, Account())
        links = int(np.count_nonzero(weights) - np.count_nonzero(np.diag(weights)))
        weights = self._received(name, np.asarray(weights), account)
        mixed = jax.block_until_ready(mix(jnp.asarray(weights, jnp.float32), rows))
        sent = links * sum(a.nbytes // a.shape[0] for a in rows.values())
        account.rounds += 1
        account.bytes_up += sent
        account.bytes_down += sent
        account.seconds += time.perf_counter() - start
        return mixed

    def _received(self, name: str, weights: np.ndarray, account: Account) -> np.ndarray:
        """The weights of what arrives. For a message that does not, or is no good, a client takes its own."""
        faults = getattr(self.engine, "broken", None)  # only an engine that makes faults has them
        if faults is None:
            return weights
        broken, weights = faults(name, (self.seed, "round", self.ledger.rounds), weights), weights.copy()
        for (to, sender), (kind, why) in broken.items():
            self.ledger.injected[f"client {sender}: {name}: {kind}"] += 1
            self.ledger.rejected[f"client {sender}: {name}: {why}"] += 1
            account.rejected += 1
            if kind != "twice":
                weights[to, to] += weights[to, sender]
                weights[to, sender] = 0.0
        return weights

    def probe(self, step: Step[Any, R], clients: Sequence[int] | None = None, **arguments: Any) -> R:
        """As `round`, for a measurement: billed apart, on any clients, without touching what they hold."""
        chosen = self.clients if clients is None else clients
        call = _call(step, (self.seed, "probe", self.ledger.rounds), chosen, {}, arguments)
        return self._exchange(call, self.ledger.probes.setdefault(step.name, Account()), Mean())

    @property
    def epsilon(self) -> float | None:
        """ε of all uploads so far, for the data of one client; None without privacy."""
        if self.privacy is None:
            return None
        return self.privacy.epsilon(self.ledger.releases, self.engine.clients.count)

    def _accumulator(self, call: Call) -> Accumulator:
        """What puts the replies of a round together."""
        if self.privacy is not None and self.privacy.mode == "central":
            return NoisySum(self.privacy, call)
        return Mean() if self._aggregator is None else Rows(self._aggregator, call.before)

    def _exchange(self, call: Call, account: Account, gathered: Accumulator) -> Any:
        start = time.perf_counter()
        took = _Round(gathered, self._wanted or len(call.clients))
        fewest = min(needed(self._min_replies, len(call.clients)), took.wanted)
        for attempt in range(self._policies.retries + 1):
            asked = tuple(c for c in call.clients if c not in took.well)
            if attempt and (not asked or gathered.count >= took.wanted):
                break
            self._ask(call.again(asked, attempt) if attempt else call, account, took)
            account.retries += len(asked) if attempt else 0
        account.rounds += 1
        account.seconds += time.perf_counter() - start
        for name in call.held:  # who did not answer well is not counted on to have it
            self._shelves[name].holders.update(took.well)
        if gathered.count < fewest:
            raise _complaint(call, gathered.count, fewest, took.reasons)
        self._judge(call, took)
        return gathered.value

    def _ask(self, call: Call, account: Account, took: _Round) -> None:
        """Run the step on the clients of a call, and gather what is valid."""
        account.bytes_down += len(call.clients) * _nbytes(call.arrays)
        account.bytes_down += sum(len(h.missing) * _nbytes(h.value) for h in call.held.values())
        for replies in self.engine.replies(call):
            account.wire_up += replies.wire[0]
            account.wire_down += replies.wire[1]
            account.bytes_up += sum(a.nbytes for a in jax.tree.leaves(replies.reply) if a.ndim > 1)
            self.ledger.injected.update(f"client {c}: {call.step.name}: {k}" for c, k in replies.injected.items())
            refused = [*replies.absent.items(), *replies.failures.items()]
            took.badly.update(replies.failures)
            late = self._policies.deadline is not None and replies.delay > self._policies.deadline
            if late:
                refused += [(c, f"late: after {self._policies.deadline:g} s") for c in replies.clients]
            elif why := self._refusal(call, replies, took):
                refused += [(c, why) for c in replies.clients]
                took.badly.update(replies.clients)
            else:
                refused += self._gather(replies, account, took)
            account.rejected += len(refused)
            self.ledger.rejected.update(f"client {c}: {call.step.name}: {why}" for c, why in refused)
            took.reasons.update(refused)

    def _gather(self, replies: Replies, account: Account, took: _Round) -> Iterator[tuple[int, str]]:
        """Add what is valid, until there is enough; who was left out, and why."""
        while replies.clients and took.gathered.count < took.wanted:
            part, replies = replies.split(took.wanted - took.gathered.count)
            left_out = took.gathered.add(part, self._weights(part.clients))
            took.well.update(c for c in part.clients if c not in left_out)
            took.badly.update(left_out)
            yield from left_out.items()
        account.surplus += len(replies.clients)

    def _judge(self, call: Call, took: _Round) -> None:
        """Leave those out for a while who answered badly too often in a row."""
        if call.address[1] != "round" or not (took.badly or self.ledger.conduct.strikes):
            return
        rounds = self.ledger.rounds
        named = self.ledger.conduct.book(took.well, took.badly - took.well, rounds, self._policies)
        until = rounds + self._policies.left_out
        self.ledger.left_out += [{"client": c, "round": rounds, "until": until} for c in named]

    def _refusal(self, call: Call, replies: Replies, took: _Round) -> str | None:
        """Why replies are not used, if so."""
        if not replies.clients:
            return None
        if replies.address is not None and replies.address != call.address:
            return f"a reply to {' '.join(map(str, replies.address[1:]))}"
        if not took.well.isdisjoint(replies.clients):
            return "answered twice"
        return self._misfit(call, replies, took.gathered.fields)

    def _misfit(self, call: Call, replies: Replies, before: list[str] | None) -> str | None:
        """Why stacked replies do not have the fields, shapes and type that the step promises, if so."""
        problem = self.engine.problem
        p, q = problem.size_x, problem.size_y
        shapes = {"x": (p,), "y": (q,), "scalar": (), "xy": (p, q), "yy": (q, q)}
        fields = replies.reply._asdict() if hasattr(replies.reply, "_asdict") else {}
        if fields.keys() != call.step.reply.keys():
            return f"fields {sorted(fields)} instead of {sorted(call.step.reply)}"
        for name, kind in call.step.reply.items():
            value = fields[name]
            if value is None:
                continue
            shape = value.shape[2 if kind == "yy" else 1 :]
            if shape != shapes[kind]:
                return f"{name} has shape {shape} instead of {shapes[kind]}"
            if value.dtype != jnp.float32:
                return f"{name} has type {value.dtype} instead of float32"
        if before is not None and before != present(replies.reply):
            return "another selection of fields than the replies before it"
        return None

    def _weights(self, clients: tuple[int, ...]) -> np.ndarray:
        if self._weighting == "uniform":
            return np.ones(len(clients), np.float32)
        return np.asarray([sum(self.engine.clients.size(c)) for c in clients], np.float32)


def needed(min_replies: int | float, asked: int) -> int:
    """How many valid replies a round with so many clients needs: a number, or a share of them."""
    return min_replies if isinstance(min_replies, int) else max(1, round(min_replies * asked))


def cohort_size(participation: int | float, clients: int) -> int:
    """How many clients a participation means: a whole number is a count, a float a share, at least one."""
    if isinstance(participation, int):
        if not 1 <= participation <= clients:
            raise SettingsError(
                f"participation = {participation} is wrong: there are {clients} clients; use 1 to {clients}, "
                "or a share such as 0.1"
            )
        return participation
    if not 0 < participation <= 1:
        raise SettingsError(
            f"participation = {participation} is wrong: a share lies above 0 and at most at 1; "
            "write a whole number for a count of clients"
        )
    return max(1, round(participation * clients))


def _call(
    step: Step[Any, Any],
    address: tuple[int | str, ...],
    clients: Sequence[int],
    held: dict[str, Held],
    arguments: dict[str, Any],
    local: bool = False,
) -> Call:
    arrays: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    own: dict[str, PerClient] = {}
    samples: dict[str, Descriptor] = {}
    for name, value in arguments.items():
        if isinstance(value, Descriptor):
            samples[name] = value
        elif isinstance(value, PerClient):
            own[name] = value
        elif isinstance(value, Array | np.ndarray):
            arrays[name] = value
        elif isinstance(value, float):
            arrays[name] = np.float32(value)
        else:
            constants[name] = value
    return Call(step, address, tuple(clients), held, arrays, constants, own, samples, local=local)


def _nbytes(tree: Any) -> int:
    """Payload bytes: vectors count, scalars do not."""
    return sum(a.nbytes for a in jax.tree.leaves(tree) if a.ndim)


def _complaint(call: Call, got: int, needed: int, reasons: Mapping[int, str]) -> TooFewReplies:
    """The error of a round without enough valid replies: divergence, if most of them are not finite."""
    text = f"{call}: {got} valid replies of {len(call.clients)}, {needed} needed"
    text += "".join(f"; client {c}: {why}" for c, why in list(reasons.items())[:3])
    text += f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
    wild = [why.partition(" ")[0] for why in reasons.values() if "not finite" in why or "beyond" in why]
    if 2 * len(wild) <= len(reasons) or not wild:
        return TooFewReplies(text)
    numbers = {k: float(v) for k, v in call.arrays.items() if np.ndim(v) == 0}
    if numbers:
        text += f"; try a smaller {', '.join(f'{k} ({v:.3g})' for k, v in numbers.items())}"
    return Diverged(text, dict.fromkeys(wild), numbers)
