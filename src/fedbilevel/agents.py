"""Methods without a server: every client works locally and exchanges vectors with its neighbours."""

from __future__ import annotations

import time
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ._collection import complaint, misfit
from .aggregate import mix, not_finite
from .engines import expect
from .errors import SettingsError
from .federation import Federation
from .ledger import Account, Event
from .rng import Address, Kind
from .steps import Step

R = TypeVar("R", bound=tuple[Any, ...])


class Agents:
    """The clients of a federation as agents that talk with one another."""

    def __init__(self, fed: Federation) -> None:
        if not fed.engine.capabilities.local_work:
            raise SettingsError(
                "the algorithm has no server, and this engine reaches its clients through one; "
                "use the engine simulation, loop or ray, or an algorithm with a server"
            )
        self._fed = fed

    def __len__(self) -> int:
        return len(self._fed.clients)

    def each(self, step: Step[Any, R], **arguments: Any) -> R:
        """Run `step` on every client without communication; the result has one row for each client's reply.

        A reply that is not valid raises, because no other client can replace it. The samples have their own
        addresses, which they share with no other work and no round.
        """
        fed, ledger = self._fed, self._fed.ledger
        call = fed.call(Kind.LOCAL, step, fed.clients, arguments)
        expected = expect(call, fed.engine.problem)
        account = ledger.steps.setdefault(step.name, Account())
        start = time.perf_counter()
        rows: list[Any] = []
        for replies in fed.engine.replies(call):
            why = misfit(call, replies, expected) if replies.clients else None
            reasons = dict.fromkeys(replies.clients, why) if why else {} if replies.sound else not_finite(replies)
            if reasons := {**replies.refused, **reasons}:
                raise complaint(call, len(call.clients) - len(reasons), len(call.clients), reasons)
            rows.append(replies.reply)
        account.seconds += time.perf_counter() - start
        ledger.local += 1
        return rows[0] if len(rows) == 1 else jax.tree.map(lambda *a: jnp.concatenate(a), *rows)

    def exchange(self, name: str, weights: np.ndarray, **rows: Array) -> dict[str, Array]:
        """One round of gossip: client i sends its rows to its neighbours and mixes v_i ← Σ_j w_ij v_j.

        It is booked under `name` as one round. Each vector is billed once for every neighbour that receives it.
        """
        start = time.perf_counter()
        account = self._fed.ledger.steps.setdefault(name, Account())
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
        """The weights of the messages that arrive. A client replaces a message that is lost by its own row."""
        fed = self._fed
        faults = fed.engine.capabilities.link_faults
        if faults is None:
            return weights
        broken = faults(name, Address(fed.seed, Kind.ROUND, fed.ledger.rounds), weights)
        weights = weights.copy()
        for (to, sender), fault in broken.items():
            fed.ledger.injected[Event(sender, name, fault.kind)] += 1
            fed.ledger.rejected[Event(sender, name, fault.why)] += 1
            account.rejected += 1
            if fault.lost:
                weights[to, to] += weights[to, sender]
                weights[to, sender] = 0.0
        return weights
