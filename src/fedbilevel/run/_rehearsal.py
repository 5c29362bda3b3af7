"""The rounds of an outer iteration, counted before it is begun."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from ..algorithms import Algorithm
from ..data import Clients
from ..engines import Call, Capabilities, Engine, Replies, expect
from ..federation import Federation
from ..ledger import Ledger
from ..problem import BilevelProblem
from ..rng import Kind


def rehearsed_rounds(algorithm: Algorithm, fed: Federation, state: Any) -> int | None:
    """The rounds that an iteration from this state would take, or None if the method cannot be rehearsed.

    The method itself is run, with replies of zeros in the shapes that its steps return, and with the books as they
    are, so that what it draws is what it would draw. No client computes, nothing is sent, and the books do not
    change. A method whose number of rounds depends on the values of replies may take another number.
    """
    done = _rehearsed(algorithm, fed, state)
    return None if done is None else done[0].rounds - fed.ledger.rounds


def rehearsed_calls(algorithm: Algorithm, fed: Federation, state: Any) -> list[Call] | None:
    """The calls that an iteration from this state would make, as `rehearsed_rounds` finds them."""
    done = _rehearsed(algorithm, fed, state)
    return None if done is None else done[1]


def _rehearsed(algorithm: Algorithm, fed: Federation, state: Any) -> tuple[Ledger, list[Call]] | None:
    """The books after an iteration, and its calls. Exchanges between agents are in the books only."""
    ledger, engine = Ledger.from_mapping(fed.ledger.to_mapping()), Zeros(fed.engine)
    with contextlib.suppress(Exception):  # a method that cannot bear zeros is not wrong
        algorithm.step(Federation(engine, seed=fed.seed, ledger=ledger), state)
        return ledger, engine.calls
    return None


@dataclass(frozen=True)
class Zeros:
    """An engine whose clients reply zeros. In a round the first client replies for all."""

    engine: Engine
    calls: list[Call] = field(default_factory=list)

    @property
    def problem(self) -> BilevelProblem:
        return self.engine.problem

    @property
    def clients(self) -> Clients:
        return self.engine.clients

    @property
    def capabilities(self) -> Capabilities:
        return replace(self.engine.capabilities, states=None, link_faults=None)

    def replies(self, call: Call) -> Iterator[Replies]:
        self.calls.append(call)
        who = call.clients if call.kind is Kind.LOCAL else call.clients[:1]
        shapes = expect(call, self.problem).fields
        made = {name: jnp.zeros((len(who), *shape), jnp.float32) for name, shape in shapes.items()}
        yield Replies(clients=tuple(who), reply=call.step.reply_type(**dict.fromkeys(call.step.reply) | made))

    def close(self) -> None:
        """There is nothing to release."""
