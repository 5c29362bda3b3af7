"""What one outer iteration sends and draws, recorded while it runs.

`Traced` stands around an engine and notes every round that the algorithm makes: which vectors go down and come
back, and how many rows the clients draw for it. Table 1 counts loops and samples in it, and figure 1 is drawn from
it. The ledger counts rounds and bytes, and a test compares the two.

Not every draw that a step is offered is used: AggITD's step `gradients` takes rows for ∇_y f in all of its rounds
and uses them in one. So the step is evaluated once more, abstractly, with an oracle that notes which of its draws
a derivative is taken on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from ..data import Clients, ClientSize
from ..engines import Call, Capabilities, Engine, Replies, expect
from ..oracle import Oracle, Shapes
from ..problem import BilevelProblem
from ..rng import Kind
from ..run import train
from ..spec import Spec
from ..steps import Descriptor, Draw, Epochs, PerClient, Sample, Samples, Stream

Struct = jax.ShapeDtypeStruct


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
    products = {name for name, taken in used.items() if taken.keys() <= {"g_yy", "g_xy"}}
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


def rows_drawn(descriptor: Descriptor, client: int, size: ClientSize) -> int:
    """The number of rows that a client of this size draws for a descriptor."""
    rows: int = getattr(size, descriptor.part)
    if isinstance(descriptor, Epochs):
        return rows * descriptor.epochs
    draws = 1
    if isinstance(descriptor, Samples):
        count = descriptor.count
        draws = int(count.values[client]) if isinstance(count, PerClient) else count
    return draws * (rows if descriptor.size is None else min(descriptor.size, rows))


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


def derivatives(call: Call, problem: BilevelProblem) -> dict[str, dict[str, None]]:
    """Which derivatives the step of a call takes on each of its draws, in order; unused draws are absent.

    Each draw is given a length of its own, by which the oracle recognises it. A stream has two steps, because the
    first step of an SVRG-type loop needs no gradient.
    """
    lengths = {name: place + 1 for place, name in enumerate(call.samples)}
    oracle: Noting | None = None

    def one(vectors: Any, sent: Any, own: Any, draws: Any) -> Any:
        nonlocal oracle
        oracle = Noting(Shapes(problem.size_x, problem.size_y, vectors))
        return call.step(oracle, **sent, **call.constants, **own, **draws)

    jax.eval_shape(
        one,
        {name: _struct(held.value) for name, held in call.held.items()},
        {name: _struct(value) for name, value in call.arrays.items()},
        {name: Struct(np.shape(each.values[call.clients[0]]), jnp.float32) for name, each in call.rows.items()},
        {name: _draw(descriptor, lengths[name]) for name, descriptor in call.samples.items()},
    )
    assert oracle is not None
    by_length = {length: name for name, length in lengths.items()}
    found: dict[str, dict[str, None]] = {}
    for derivative, length in oracle.taken:
        found.setdefault(by_length[length], {})[derivative] = None
    return found


def _struct(value: Any) -> Struct:
    return Struct(np.shape(value), jnp.result_type(value))


def _draw(descriptor: Descriptor, length: int) -> Any:
    if isinstance(descriptor, Sample):
        return Draw(Struct((length,), jnp.int32), Struct((length,), jnp.float32))
    steps = 2
    draws = Draw(Struct((steps, length), jnp.int32), Struct((steps, length), jnp.float32))
    return Stream(draws, Struct((steps,), jnp.bool_))


@dataclass
class Noting:
    """An oracle that notes which derivatives are taken, each with the length of the draw that it is taken on."""

    shapes: Oracle
    taken: list[tuple[str, int]] = field(default_factory=list)

    @property
    def x(self) -> Array:
        return self.shapes.x

    @property
    def y(self) -> Array:
        return self.shapes.y

    def held(self, name: str) -> Array:
        return self.shapes.held(name)

    def own(self, name: str, default: Any) -> Any:
        return self.shapes.own(name, default)

    def _note(self, derivative: str, draw: Draw) -> None:
        self.taken.append((derivative, draw.index.shape[-1]))

    def f(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        self._note("f", xi)
        return self.shapes.f(y, xi, at)

    def g(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        self._note("g", zeta)
        return self.shapes.g(y, zeta, at)

    def f_x(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        self._note("f_x", xi)
        return self.shapes.f_x(y, xi, at)

    def f_y(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        self._note("f_y", xi)
        return self.shapes.f_y(y, xi, at)

    def g_y(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        self._note("g_y", zeta)
        return self.shapes.g_y(y, zeta, at)

    def g_yy(self, y: Array, v: Array, u: Draw, at: Array | None = None) -> Array:
        self._note("g_yy", u)
        return self.shapes.g_yy(y, v, u, at)

    def g_xy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        self._note("g_xy", chi)
        return self.shapes.g_xy(y, v, chi, at)
