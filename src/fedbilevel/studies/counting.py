"""What a client computes in a call, counted by the oracle itself: the step is traced with an oracle that notes.

Every derivative that the step asks for becomes an operation of the traced program, which has the draw that it is
taken on. A loop of local steps is traced with as many steps as the client makes, so the count is that of the
derivatives which the client would compute: those of a loop once for each step, those that a method saves (the
first step of an SVRG-type loop, the anchor of full batches) not at all. Nobody writes a number down by hand.

Work is counted in gradient equivalents. One of them is a gradient on all rows of the client at that level, so a
minibatch counts by its share of the rows:

    ∇_x f, ∇_y f, ∇_x g, ∇_y g, and losses    1 each
    ∇²_y g v, ∇_x∇_y g v                      2 each
    the three directions at once              1 for both gradients of f, 3 for ∇_y g, ∇²_y g v and ∇_x∇_y g v
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive
from jax.interpreters import ad, batching

from ..data import Clients, ClientSize
from ..engines import Call
from ..errors import StepError
from ..federation import Federation
from ..oracle import Directions, Oracle, Shapes
from ..problem import BilevelProblem, Problem, Task
from ..rng import Kind
from ..run import Zeros
from ..spec import Spec
from ..steps import Descriptor, Draw, Epochs, PartName, PerClient, Sample, Samples, Stream

Struct = jax.ShapeDtypeStruct
PRODUCTS = {"g_yy", "g_xy", "g_wy"}  # products with a second derivative
PRODUCT = "product"  # one that a step makes itself, by differentiating a gradient
WEIGHTS = {"g_yy": 2.0, "g_xy": 2.0, "g_wy": 2.0, PRODUCT: 2.0, "three of g": 3.0}  # all others count 1


class Taken(NamedTuple):
    """A derivative, the level whose rows it is taken on, and the length of the draw; None for all rows."""

    derivative: str
    part: PartName
    length: int | None


taking = Primitive("derivative_of_a_client")


def _shape(*_: Any, shape: tuple[int, ...], **__: Any) -> Any:
    return jax.core.ShapedArray(shape, jnp.float32)


def _batched(args: Any, axes: Any, *, shape: tuple[int, ...], times: int, **how: Any) -> Any:
    """Several derivatives in one operation, as `vmap` makes them."""
    count = next(a.shape[axis] for a, axis in zip(args, axes, strict=True) if axis is not None)
    return taking.bind(*args, shape=(count, *shape), times=times * count, **how), 0


def _along(primals: Any, tangents: Any, *, what: Taken, **how: Any) -> Any:
    """The derivative of a derivative: a product with a second one, each time that it is applied."""
    moving = [each for each in tangents if not isinstance(each, ad.Zero)]
    product = what._replace(derivative=PRODUCT)
    return taking.bind(*primals, what=what, **how), taking.bind(*primals, *moving, what=product, **how)


taking.def_abstract_eval(_shape)
batching.primitive_batchers[taking] = _batched
ad.primitive_jvps[taking] = _along


@dataclass
class Noting:
    """An oracle whose derivatives are operations of the traced program, and are noted in order."""

    shapes: Shapes
    taken: list[Taken] = field(default_factory=list)

    @property
    def x(self) -> Array:
        return self.shapes.x

    @property
    def y(self) -> Array:
        return self.shapes.y

    @property
    def y_start(self) -> Array:
        return self.shapes.y_start

    @property
    def w(self) -> Array:
        return self.shapes.w

    def held(self, name: str) -> Array:
        return self.shapes.held(name)

    def own(self, name: str, default: Any) -> Any:
        return self.shapes.own(name, default)

    def _take(self, derivative: str, part: PartName, like: Array, draw: Draw, *at: Array | None) -> Array:
        length = None if draw.index is None else int(draw.index.shape[-1])
        self.taken.append(Taken(derivative, part, length))
        given = [jnp.asarray(each) for each in at if each is not None]
        made: Array = taking.bind(*given, shape=jnp.shape(like), times=1, what=self.taken[-1])
        return made

    def f(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self._take("f", "upper", self.shapes.f(y, xi, at), xi, y, at)

    def g(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        return self._take("g", "lower", self.shapes.g(y, zeta, at), zeta, y, at)

    def f_x(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self._take("f_x", "upper", self.shapes.f_x(y, xi, at), xi, y, at)

    def f_y(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self._take("f_y", "upper", self.shapes.f_y(y, xi, at), xi, y, at)

    def g_x(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        return self._take("g_x", "lower", self.shapes.g_x(y, zeta, at), zeta, y, at)

    def g_y(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        return self._take("g_y", "lower", self.shapes.g_y(y, zeta, at), zeta, y, at)

    def g_yy(self, y: Array, v: Array, u: Draw, at: Array | None = None) -> Array:
        return self._take("g_yy", "lower", self.shapes.g_yy(y, v, u, at), u, y, v, at)

    def g_xy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        return self._take("g_xy", "lower", self.shapes.g_xy(y, v, chi, at), chi, y, v, at)

    def f_w(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self._take("f_w", "upper", self.shapes.f_w(y, xi, at), xi, y, at)

    def g_wy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        return self._take("g_wy", "lower", self.shapes.g_wy(y, v, chi, at), chi, y, v, at)


class NotingOnePass(Noting):
    """The oracle of a problem that computes the three directions at once."""

    def directions(self, y: Array, v: Array, zeta: Draw, xi: Draw, at: Array | None = None) -> Directions:
        in_f = self._take("both of f", "upper", self.shapes.f_x(y, xi, at), xi, y, v, at)
        in_y = self._take("three of g", "lower", self.shapes.g_y(y, zeta, at), zeta, y, v, at)
        return Directions(in_f, in_y, in_y)


def derivatives(call: Call, problem: BilevelProblem) -> dict[str, dict[str, None]]:
    """Which derivatives the step of a call takes on each of its draws, in order; unused draws are absent.

    Each draw is given a length of its own, by which the oracle recognises it. A stream has two steps, because the
    first step of an SVRG-type loop needs no gradient. The three directions are taken one by one.
    """
    lengths = {name: place + 1 for place, name in enumerate(call.samples)}
    draws = {name: _drawn(each, lengths[name], 2) for name, each in call.samples.items()}
    by_length = {length: name for name, length in lengths.items()}
    found: dict[str, dict[str, None]] = {}
    for taken in _traced(call, problem, draws, Noting)[0]:
        assert taken.length is not None
        found.setdefault(by_length[taken.length], {})[taken.derivative] = None
    return found


def work_of(call: Call, problem: BilevelProblem, clients: Clients) -> float:
    """The gradient equivalents that all clients of a call compute together."""
    lengths = {name: place + 1 for place, name in enumerate(call.samples)}
    counted: dict[tuple[int, ...], Counter[Taken]] = {}
    total = 0.0
    for client in call.clients:
        size = clients.size(client)
        steps = tuple(steps_drawn(each, client, size) for each in call.samples.values())
        if steps not in counted:
            draws = {
                name: _drawn(each, None if each.size is None else lengths[name], count)
                for (name, each), count in zip(call.samples.items(), steps, strict=True)
            }
            oracle = NotingOnePass if isinstance(problem, Problem) else Noting
            counted[steps] = _counted(_traced(call, problem, draws, oracle)[1].jaxpr)
        rows = {
            lengths[name]: rows_drawn(each, client, size) / max(count, 1) / max(getattr(size, each.part), 1)
            for (name, each), count in zip(call.samples.items(), steps, strict=True)
        }
        for taken, times in counted[steps].items():
            share = 1.0 if taken.length is None else rows[taken.length]
            total += WEIGHTS.get(taken.derivative, 1.0) * times * share
    return total


class Cost(NamedTuple):
    """What an outer iteration costs.

    rounds   its communication rounds
    work     the gradient equivalents of a registered client
    rows     the most rows of one level that a client is asked to draw in one round, even if it has fewer
    """

    rounds: int
    work: float
    rows: int


def costs(spec: Spec, task: Task) -> Iterator[Cost]:
    """The cost of one outer iteration of a spec after the other, without end; no client computes anything.

    The method itself is run with replies of zeros, and draws what it would draw in a run of the spec. A method
    whose rounds depend on the values of replies may do others in a run.
    """
    clients, known = spec.clients(task), dict[Any, tuple[float, int]]()
    rules, done = spec.federation, 0
    with closing(rules.build(task.problem, clients)) as base:
        engine = Zeros(base)
        fed = Federation(engine, seed=spec.seed, cohorts=rules.cohort, iteration=lambda: done)
        state: Any = spec.algorithm.init(task.problem, clients.count)
        while True:
            engine.calls.clear()
            before = fed.ledger.rounds
            state = spec.algorithm.step(fed, state)
            total, most = 0.0, 0
            for call in engine.calls:
                if call.kind is Kind.PROBE:
                    continue
                sizes = tuple(map(clients.size, call.clients))
                counts = tuple(each.count for each in call.samples.values() if isinstance(each, Samples))
                own = any(isinstance(count, PerClient) for count in counts)
                key = call.step.name, *call.shapes, sizes, call.clients if own else ()
                if key not in known:
                    known[key] = work_of(call, task.problem, clients), _most_rows(call, task.problem, clients)
                total, most = total + known[key][0], max(most, known[key][1])
            done += 1
            yield Cost(fed.ledger.rounds - before, total / clients.count, most)


def _most_rows(call: Call, problem: BilevelProblem, clients: Clients) -> int:
    """The most rows of one level that a client of a call is asked for; draws that are not used do not count."""
    used, most = derivatives(call, problem), 0
    for client in call.clients:
        size, rows = clients.size(client), Counter[str]()
        for name in used:
            each = call.samples[name]
            whole: int = getattr(size, each.part)
            rows[each.part] += steps_drawn(each, client, size) * (each.size or whole)
        most = max(most, *rows.values(), 0)
    return most


def rows_drawn(descriptor: Descriptor, client: int, size: ClientSize) -> int:
    """The number of rows that a client of this size draws for a descriptor."""
    rows: int = getattr(size, descriptor.part)
    if isinstance(descriptor, Epochs):
        return rows * descriptor.epochs
    return steps_drawn(descriptor, client, size) * (
        rows if descriptor.size is None else min(descriptor.size, rows)
    )


def steps_drawn(descriptor: Descriptor, client: int, size: ClientSize) -> int:
    """The number of minibatches that a client of this size draws for a descriptor."""
    if isinstance(descriptor, Samples):
        count = descriptor.count
        return int(count.values[client]) if isinstance(count, PerClient) else count
    if isinstance(descriptor, Epochs):
        rows: int = getattr(size, descriptor.part)
        return descriptor.epochs * (1 if descriptor.size is None else -(-rows // descriptor.size))
    return 1


def _traced(call: Call, problem: BilevelProblem, draws: Mapping[str, Any], kind: Any) -> tuple[list[Taken], Any]:
    """What the step of a call takes for one client, in order, and the traced program."""
    oracle: Noting | None = None

    def one(vectors: Any, sent: Any, own: Any, drawn: Any) -> Any:
        nonlocal oracle
        oracle = kind(Shapes(problem.size_x, problem.size_y, vectors))
        return call.step(oracle, **sent, **call.constants, **own, **drawn)

    made = jax.make_jaxpr(one)(
        {name: _struct(held.value) for name, held in call.held.items()},
        {name: _struct(value) for name, value in call.arrays.items()},
        {name: Struct(np.shape(each.values[call.clients[0]]), jnp.float32) for name, each in call.rows.items()},
        dict(draws),
    )
    assert oracle is not None
    return oracle.taken, made


def _counted(jaxpr: Any, times: int = 1) -> Counter[Taken]:
    """How often each derivative is taken in a traced program; a loop counts as often as it is run."""
    found: Counter[Taken] = Counter()
    for equation in jaxpr.eqns:
        inner = [p.jaxpr if hasattr(p, "jaxpr") else p for p in jax.tree.leaves(_programs(equation.params))]
        if equation.primitive is taking:
            found[equation.params["what"]] += times * equation.params["times"]
        elif equation.primitive.name == "while" and any(map(_counted, inner)):
            raise StepError(
                "a loop whose length depends on values takes derivatives, which cannot be counted; use walk"
            )
        elif equation.primitive.name == "cond":
            found.update(max((_counted(each, times) for each in inner), key=lambda taken: sum(taken.values())))
        else:
            for each in inner:
                found += _counted(each, times * equation.params.get("length", 1))
    return found


def _programs(parameters: Mapping[str, Any]) -> list[Any]:
    """The programs inside of an operation: the body of a loop, the branches of a choice, a call."""
    found = []
    for value in parameters.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns") or hasattr(getattr(each, "jaxpr", None), "eqns"):
                found.append(each)
    return found


def _struct(value: Any) -> Struct:
    return Struct(np.shape(value), jnp.result_type(value))


def _drawn(descriptor: Descriptor, length: int | None, steps: int) -> Any:
    """The shapes of a draw of this length, or of all rows, and for a stream of so many steps."""

    def draw(*leading: int) -> Draw:
        if length is None:
            return Draw(None, None)
        return Draw(Struct((*leading, length), jnp.int32), Struct((*leading, length), jnp.float32))

    return draw() if isinstance(descriptor, Sample) else Stream(draw(steps), Struct((steps,), jnp.bool_))


_: type[Oracle] = Noting
