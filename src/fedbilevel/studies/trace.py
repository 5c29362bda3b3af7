"""What one outer iteration sends and draws, recorded while it runs.

`Traced` stands around an engine and notes every round that the algorithm makes: which vectors go down and come
back, and how many rows the clients draw for it. Table 1 counts loops and samples in it, and figure 1 is drawn from
it. The ledger counts rounds and bytes, and a test compares the two.

Not every draw that a step is offered is used: AggITD's step `gradients` takes rows for ∇_y f in all of its rounds
and uses them in one. So the step is traced once more, with an oracle that notes which of its draws a derivative is
taken on (`counting.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from ..data import Clients
from ..engines import Call, Capabilities, Engine, Replies, expect
from ..problem import BilevelProblem
from ..rng import Kind
from ..run import train
from ..spec import Spec
from ..steps import Sample
from .counting import PRODUCTS, derivatives, rows_drawn


@dataclass(frozen=True)
class TracedRound:
    """One round of an algorithm.

    held       the floats of each vector that was sent to be held, by name; only where some client did not have it
    down       the floats of each vector that was sent for this round alone, by name
    up         the floats of each field of the reply, by name
    gradients  the rows that a client drew for gradients, on average over the cohort
    products   the rows that a client drew for products with a second derivative, in the same way
    taken      the derivatives that a client took, by their names in `Oracle`
    local      whether the client took them in a loop of local steps
    """

    step: str
    held: Mapping[str, int]
    down: Mapping[str, int]
    up: Mapping[str, int]
    gradients: float
    products: float
    taken: tuple[str, ...]
    local: bool


@dataclass
class Traced:
    """An engine that notes the rounds that it is asked for."""

    engine: Engine
    noted: list[TracedRound] = field(default_factory=list)

    @property
    def problem(self) -> BilevelProblem:
        return self.engine.problem

    @property
    def clients(self) -> Clients:
        return self.engine.clients

    @property
    def capabilities(self) -> Capabilities:
        return self.engine.capabilities

    def replies(self, call: Call) -> Iterator[Replies]:
        if call.kind is Kind.ROUND and call.attempt == 0:
            self.noted.append(traced(call, self.problem, self.clients))
        return self.engine.replies(call)

    def close(self) -> None:
        self.engine.close()


def trace(spec: Spec, iterations: int) -> list[list[TracedRound]]:
    """Run some outer iterations of a spec and return the rounds of each."""
    task = spec.task()
    engine = Traced(spec.federation.build(task.problem, task.clients))
    found: list[list[TracedRound]] = []

    def note(_: Any) -> None:
        found.append(engine.noted)
        engine.noted = []

    try:
        train(
            task.problem,
            task.clients,
            spec.algorithm,
            stop={"iterations": iterations},
            engine=engine,
            federation=spec.federation,
            measure=task.measure,
            seed=spec.seed,
            observers=[note],
        )
    finally:
        engine.close()
    return found


def traced(call: Call, problem: BilevelProblem, clients: Clients) -> TracedRound:
    """Note a call."""
    used = derivatives(call, problem)
    products = {name for name, taken in used.items() if taken.keys() <= PRODUCTS}
    sizes = {client: clients.size(client) for client in call.clients}

    def drawn(names: set[str]) -> float:
        rows = [rows_drawn(call.samples[name], c, size) for name in names for c, size in sizes.items()]
        return sum(rows) / len(sizes)

    return TracedRound(
        call.step.name,
        {name: int(np.size(held.value)) for name, held in call.held.items() if held.missing},
        {name: int(np.size(value)) for name, value in call.arrays.items() if np.ndim(value)},
        {name: int(np.prod(shape)) for name, shape in expect(call, problem).fields.items()},
        gradients=drawn(used.keys() - products),
        products=drawn(products),
        taken=tuple(dict.fromkeys(one for taken in used.values() for one in taken)),
        local=any(not isinstance(call.samples[name], Sample) for name in used),
    )


class Span(NamedTuple):
    """Consecutive rounds, from the first to the one before `end`."""

    start: int
    end: int


def loops(steps: Sequence[str]) -> list[Span]:
    """The loops in a sequence of steps: blocks of consecutive rounds that are repeated at once.

    A last repetition may end early, as the one of AggITD does at t = N.
    """
    found: list[Span] = []
    at = 0
    while at < len(steps):
        length = next(
            (n for n in range(1, len(steps) - at) if steps[at : at + n] == steps[at + n : at + 2 * n]), 0
        )
        end = at + 1
        if length:
            while end < len(steps) and (end < at + length or steps[end] == steps[end - length]):
                end += 1
            found.append(Span(at, end))
        at = end
    return found
