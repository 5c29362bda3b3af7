"""The federation: a cohort, the vectors that it holds, and rounds.

One call of `round` is one communication round: vectors are sent to the cohort, each client runs a step, and the
mean of the valid replies comes back. The number of rounds, such as 2N+3, is measured by the ledger and never
written by hand. `agents.py` has the rounds of methods without a server.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import numpy as np
from jax import Array

from . import rng
from ._collection import Collection, Weighting, weights_of
from ._server import server_of
from .aggregate import Apart, Gather, Mean, Memory, Rule, gather_by, quorum, remembering, rule_of
from .engines import Averaging, Call, Engine, Held, make_call
from .errors import SettingsError, TooFewReplies
from .ledger import Account, Ledger
from .own import KEPT, OwnVariables, own_part
from .policies import Policies
from .rng import Address, Kind, Root
from .steps import Step

R = TypeVar("R", bound=tuple[Any, ...])

Cohorts = Literal["iteration", "phase", "round"]  # for how long a cohort works before another one is drawn

# Versions of held vectors. They never repeat, so federations that share an engine do not confuse their vectors.
_versions = itertools.count()


@dataclass
class _Shelf:
    """A vector that the server gave clients to hold, and the clients that have it."""

    version: int
    value: Array
    holders: set[int]


class Series(NamedTuple):
    """A series of Hessian products of a method: its first and last vector, and how many products are between them.

    summed   whether the last vector is the sum of the terms and not the last term
    """

    first: Array
    last: Array
    products: int
    summed: bool = False


class Accounting(Protocol):
    """Books the releases of a private federation; `privacy.Accountant` implements it."""

    def book(self, call: Call, drawn: int, vectors: int, result: Any) -> None: ...


class Federation:
    """A server's view of its clients.

    engine       the engine that runs the clients
    seed         the root of every random address: cohorts, samples, the algorithm's own choices; a private
                 federation has a secret one, of 32 bytes
    min_replies  a round with fewer valid replies raises `TooFewReplies`; a float is a share of the clients asked
                 (default: as many as the rule of `gather` needs, which is one for the mean)
    policies     what is tolerated: deadline, retries, oversampling, exclusion
    cohorts      a cohort works for a whole outer iteration, for one phase of it (the lower or the upper part), or
                 for one round; then another one is drawn
    iteration    gives the number of outer iterations so far, if cohorts are drawn at it and not at the number of
                 rounds; methods with different numbers of rounds then have the same cohorts (default: at rounds)
    weighting    the mean over clients is uniform, as in the paper, or weighted by their number of samples
    gather       makes the accumulator of a round's replies (default: the mean)
    accountant   books the releases of a private federation (default: no accountant)
    ledger       the ledger to continue with, if a run is resumed (default: a new one)
    memory       what rules that remember know of the rounds so far (default: nothing); it changes with every round
    """

    def __init__(
        self,
        engine: Engine,
        *,
        seed: Root = 0,
        min_replies: int | float | None = None,
        policies: Policies | None = None,
        cohorts: Cohorts = "iteration",
        iteration: Callable[[], int] | None = None,
        weighting: Weighting = "uniform",
        gather: Gather | None = None,
        accountant: Accounting | None = None,
        ledger: Ledger | None = None,
        memory: Memory | None = None,
    ) -> None:
        self.engine, self.seed = engine, seed
        self.ledger = Ledger() if ledger is None else ledger
        self._memory: Memory = {} if memory is None else memory
        self.clients: Sequence[int] = range(engine.clients.count)  # A range of a million clients is small.
        self.policies = policies or Policies()
        self._min_replies, self._weighting, self._cohorts = min_replies, weighting, cohorts
        self.iteration, self._draws = iteration, _Draws()  # shared with the cohorts that are drawn
        self._averaging = engine if isinstance(engine, Averaging) else None
        self._gather, self._accountant = gather_by(None) if gather is None else gather, accountant
        self._quorum = quorum(self._gather)
        self._server = server_of(engine.problem)
        if isinstance(min_replies, int) and min_replies < self._quorum:
            raise SettingsError(
                f"min_replies = {min_replies} is wrong: the rule needs {self._quorum} replies to tolerate a liar; "
                f"use at least {self._quorum}, or leave it out"
            )
        self._pool: Sequence[int] = self.clients  # the clients that cohorts are drawn from
        self._size: int | None = None  # the size of a cohort; None if this is the federation of all clients
        self._wanted: int | None = None  # the number of replies that is enough; None means all
        self._shelves: dict[str, _Shelf] = {}
        self.noted: dict[str, Array] = {}  # shared with the cohorts that are drawn from this federation
        self.shown: list[Series] = []  # the newest series; shared as well
        self.heard: frozenset[int] = frozenset()  # the clients whose replies the last round of this cohort used
        self._drawn = 0  # the round in which this cohort was drawn
        self._settled = [self.ledger.clock]  # shared with the cohorts that are drawn from this federation

    def elsewhere(self, engine: Engine, gather: Gather, ledger: Ledger) -> Federation:
        """A federation with the same rules on another engine and with other books, to try a method."""
        return Federation(
            engine,
            seed=self.seed,
            min_replies=self._min_replies,
            policies=self.policies,
            cohorts=self._cohorts,
            iteration=self.iteration,
            weighting=self._weighting,
            gather=gather,
            ledger=ledger,
        )

    @property
    def rules(self) -> tuple[Any, ...]:
        """The rules on which the books of an iteration and its results depend, apart from the clients."""
        return self._cohorts, self.iteration is None, self._weighting, self._min_replies, self.policies, self.rule

    @property
    def rule(self) -> Rule | None:
        """The rule that aggregates replies; None for the mean."""
        return rule_of(self._gather)

    def weights(self, clients: Sequence[int]) -> np.ndarray:
        """The weights of clients in the mean."""
        return weights_of(clients, self.engine.clients, self._weighting)

    def cohort(self, participation: int | float) -> Federation:
        """This federation with a random part of its clients: a number of clients, or a share as a float.

        It shares the ledger and the held vectors. A cohort is drawn at (seed, "cohort", rounds so far), or at
        (seed, "cohort", iterations so far, cohorts of this iteration so far), now and whenever `cohorts` asks for
        another one.
        """
        count = cohort_size(participation, len(self.clients))
        if count < self._quorum:
            raise SettingsError(
                f"participation = {participation} is wrong: a cohort has {count} clients, and the rule needs "
                f"{self._quorum} replies to tolerate a liar; ask at least {self._quorum} clients, or use the mean"
            )
        view = copy.copy(self)
        view._pool, view._size = self.clients, count
        view._draw(count)
        return view

    def next_phase(self) -> None:
        """Begin the next phase of an outer iteration, such as the upper part after the lower part.

        With `cohorts="phase"` another cohort is drawn. Its clients are sent the held vectors when they are next
        asked, and the ledger bills that.
        """
        if self._size is not None and self._cohorts == "phase":
            self._draw(self._size)

    def _draw(self, count: int) -> None:
        """Draw the clients of a cohort. Excluded clients are replaced by others."""
        self._drawn = self.ledger.rounds
        out = self.ledger.conduct.excluded(self.ledger.rounds)
        oversample = self.policies.oversample
        asked = count if oversample == 0 else math.ceil(count * (1 + oversample))
        drawn = min(asked + len(out), len(self._pool))
        if drawn < len(self._pool) or out:
            place: tuple[int, ...] = (self.ledger.rounds,)
            if self.iteration is not None:
                iteration = self.iteration()
                place = iteration, self._draws.number(iteration, self.ledger.rounds)
            chosen = drawn_clients(self.seed, place, len(self._pool), drawn)
            there = [self._pool[i] for i in chosen if self._pool[i] not in out]
            if not there:
                raise TooFewReplies(
                    f"round {self.ledger.rounds}: all {drawn} clients of the cohort are excluded for answering "
                    "badly; see `rejected` for the reasons, or set federation.strikes higher"
                )
            self.clients = tuple(sorted(there[:asked]))
        else:
            self.clients = self._pool
        self._wanted = count if oversample else None

    def rng(self, name: str) -> np.random.Generator:
        """The server's randomness for a purpose, at (seed, name, rounds so far)."""
        return rng.generator(self.seed, name, self.ledger.rounds)

    def hold(self, **vectors: Array) -> None:
        """Give clients vectors to hold. Each client is sent them once, with the next round that includes it."""
        for name, value in vectors.items():
            self._shelves[name] = _Shelf(next(_versions), value, set())

    def release(self, *names: str) -> None:
        """Let clients forget vectors that they hold. This costs nothing."""
        for name in names:
            del self._shelves[name]

    def note(self, **vectors: Array | None) -> None:
        """Note vectors of this outer iteration, such as the hypergradient. An evaluation reports their norms."""
        self.noted.update({name: vector for name, vector in vectors.items() if vector is not None})

    @property
    def own(self) -> OwnVariables | None:
        """The own variables of every client, as they are now; None if there are none, or they are elsewhere."""
        part, states = own_part(self.engine.problem), self.engine.capabilities.states
        if part is None or states is None:
            return None
        return OwnVariables(part, self.engine.clients, lambda i: states.read(i, self.ledger.clock).get(KEPT))

    def show_series(self, series: Series) -> None:
        """Show the Hessian products of this outer iteration, from which a run is advised. It costs nothing."""
        self.shown[:] = [series]

    def settle(self) -> None:
        """Note that everything so far is in a checkpoint, so clients need not keep older states."""
        self._settled[0] = self.ledger.clock

    def round(self, step: Step[Any, R], **arguments: Any) -> R:
        """One communication round: run `step` on the cohort and return the mean of the valid replies.

        Upper rows that only the server has are added to it (`_server.py`).

        With another aggregator, the result is that of its rule. The rule is given each field separately, and for a
        `Next` field the differences to the vector that the clients were given.

        The step's annotations say what is done with an argument. Vectors are sent down and billed, numbers are
        sent down but not billed, samples are drawn by each client, and `PerClient` sends each client its own
        value.
        """
        if self._size is not None and self._cohorts == "round" and self._drawn != self.ledger.rounds:
            self._draw(self._size)
        held = {
            name: Held(shelf.version, shelf.value, tuple(c for c in self.clients if c not in shelf.holders))
            for name, shelf in self._shelves.items()
        }
        call = self.call(Kind.ROUND, step, self.clients, arguments, held)
        _ = call.before  # raises if a vector is missing, even if the differences are not used
        account = self.ledger.steps.setdefault(step.name, Account())
        gathered, result = self._gather(call), None
        if remembering(gathered):
            gathered.recall(self._memory.setdefault(step.name, {}))
        collection = self._collection(call, account, gathered)
        try:
            result = collection.collect()
        finally:
            if self._accountant is not None:
                # Fields with the components of an empty x have no content.
                vectors = sum(0 not in shape for shape in collection.expected.fields.values())
                self._accountant.book(call, self._drawn, vectors, result)
            self.heard = frozenset(collection.well)
            for name in call.held:  # a client without a valid reply may not have received the vectors
                self._shelves[name].holders.update(collection.well)
            if call.keeps and self.engine.capabilities.states is None:
                self.ledger.keepers.update(dict.fromkeys(collection.well, call.clock))
        return result if self._server is None else self._server.added(call, result)

    def probe(
        self,
        step: Step[Any, R],
        clients: Sequence[int] | None = None,
        *,
        at: Mapping[str, Array] | None = None,
        apart: bool = False,
        **arguments: Any,
    ) -> R:
        """Like `round`, for a measurement on any clients: it is billed separately and leaves clients unchanged.

        at      the vectors that clients hold in this measurement, by name
        apart   the result has a row for each valid reply in place of the mean

        A private federation has no measurements, because they would be uploads without noise.
        """
        if self._accountant is not None:
            raise SettingsError(
                f"{step.name} is a measurement of clients, which would leave them without noise; "
                "measure at the server, or remove privacy.mode"
            )
        chosen = self.clients if clients is None else clients
        held = {name: Held(next(_versions), value, tuple(chosen)) for name, value in (at or {}).items()}
        call = self.call(Kind.PROBE, step, chosen, arguments, held)
        account = self.ledger.probes.setdefault(step.name, Account())
        result = self._collection(call, account, Apart() if apart else Mean()).collect()
        return result if apart or self._server is None else self._server.added(call, result)

    def call(
        self,
        kind: Kind,
        step: Step[Any, Any],
        clients: Sequence[int],
        arguments: dict[str, Any],
        held: dict[str, Held] | None = None,
    ) -> Call:
        """Make a call of a step. All addresses of randomness at clients are made here."""
        ledger = self.ledger
        address = Address(self.seed, kind, ledger.local if kind is Kind.LOCAL else ledger.rounds)
        dated = dict(drawn=self._drawn, clock=ledger.clock, settled=self._settled[0], kept=ledger.keepers)
        return make_call(step, address, clients, arguments, held=held or {}, **dated)

    def _collection(self, call: Call, account: Account, gathered: Any) -> Collection:
        wanted = self._wanted or len(call.clients)
        least = self._quorum if call.kind is Kind.ROUND else 1  # a measurement is a mean
        return Collection(
            engine=self.engine,
            averaging=self._averaging,
            call=call,
            gathered=gathered,
            policies=self.policies,
            weighting=self._weighting,
            ledger=self.ledger,
            account=account,
            wanted=wanted,
            fewest=max(min(needed(self._min_replies, len(call.clients)), wanted), least),
        )


class _Draws:
    """The numbers of rounds after which the cohorts of the present iteration were drawn."""

    def __init__(self) -> None:
        self._iteration, self._after = -1, list[int]()

    def number(self, iteration: int, rounds: int) -> int:
        """How many other cohorts were drawn before in this iteration. An iteration may be begun again."""
        if iteration != self._iteration or rounds < self._after[-1]:
            self._iteration, self._after = iteration, []
        if rounds not in self._after:
            self._after.append(rounds)
        return self._after.index(rounds)


def drawn_clients(root: Root, place: tuple[int, ...], clients: int, count: int) -> np.ndarray:
    """The clients of a cohort that is drawn at this place of a run, in the order in which they are drawn.

    place   the number of rounds so far; or the number of iterations, and that of cohorts in this iteration
    """
    return rng.generator(root, "cohort", *place).choice(clients, count, replace=False)


def needed(min_replies: int | float | None, asked: int) -> int:
    """How many valid replies a round of the mean needs: `min_replies`, or as a float a share of those asked."""
    if min_replies is None:
        return 1
    return min_replies if isinstance(min_replies, int) else max(1, round(min_replies * asked))


def cohort_size(participation: int | float, clients: int) -> int:
    """The size of a cohort: an integer participation is a count, a float is a share; it is at least one."""
    if isinstance(participation, int):
        if not 1 <= participation <= clients:
            raise SettingsError(
                f"participation = {participation} is wrong: there are {clients} clients; use 1 to {clients}, "
                "or a share such as 0.1"
            )
        return participation
    if not 0 < participation <= 1:
        raise SettingsError(
            f"participation = {participation} is wrong: a share must be above 0 and at most 1; "
            "write a whole number for a count of clients"
        )
    return max(1, round(participation * clients))
