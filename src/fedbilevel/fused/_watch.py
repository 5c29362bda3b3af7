"""A federation whose clients do nothing, for a method that is traced.

The method is run once with tracers for its state. `Federation` itself makes the calls, checks them and keeps the
books; only the engine and the accumulator are others. A call to the clients becomes one opaque operation of the
traced program, and what it needs later is noted: the call, its cohort, and the addresses of its draws.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.extend.core import Primitive

from ..data import Clients
from ..engines import Call, Capabilities, Replies, expect
from ..errors import SettingsError
from ..federation import Federation
from ..ledger import Ledger
from ..problem import BilevelProblem
from ..rng import Kind
from ..steps import Form, Step, place_of


def unfit(why: str, remedy: str = "use engine = 'simulation'") -> SettingsError:
    """The error for a method that cannot be traced."""
    return SettingsError(f"federation.engine = 'fused' is wrong for this method: {why}; {remedy}")


class Cohort(NamedTuple):
    """A cohort that is drawn in an iteration: after how many of its rounds, and of how many clients."""

    after: int
    size: int


@dataclass(frozen=True)
class Round:
    """The work of a cohort in one call.

    call     the call without its vectors, which are inputs of the operation
    inputs   what the inputs are: "held", "array" or "rows", each with a name; what is remembered of x follows
    places   the place of each draw: the number of calls of its kind between the start of the iteration and it
    cohort   the cohort, or None if it is everyone
    memory   the structure of what is remembered of x, or None
    """

    call: Call
    inputs: tuple[tuple[str, str], ...]
    places: dict[str, int]
    cohort: Cohort | None
    memory: Any


@dataclass(frozen=True)
class Remember:
    """What the clients of a cohort compute once from a new x."""

    cohort: Cohort | None


class Choice(NamedTuple):
    """A choice of the server: a method of a generator at an address. Calls on one generator share a number."""

    number: int
    name: str
    after: int
    method: str
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]

    def made(self, generator: np.random.Generator) -> Any:
        """Make the choice."""
        return getattr(generator, self.method)(*self.arguments, **dict(self.named))


class Bill(NamedTuple):
    """The vectors that clients hold in a round: the version and the bytes of each."""

    step: str
    cohort: Cohort | None
    held: tuple[tuple[int, int], ...]


@dataclass
class Watch:
    """What is noted while a method is traced."""

    rounds: int
    local: int
    nodes: list[Round | Remember] = field(default_factory=list)
    choices: list[tuple[Choice, Any]] = field(default_factory=list)
    bills: list[Bill] = field(default_factory=list)
    held: set[str] = field(default_factory=set)
    first: set[str] | None = None  # the vectors that the clients of the first round held
    generators: int = 0

    def check(self) -> None:
        """Raise if clients would hold a vector of an earlier iteration, which no checkpoint has."""
        left = self.held - (self.first or set())
        if self.first is not None and left:
            raise unfit(
                f"its clients still hold {min(left)} in the first round of the next iteration",
                "release it, hold it anew before that round, or use engine = 'simulation'",
            )


work = Primitive("work_of_clients")
work.multiple_results = True


def _shapes(*inputs: Any, number: int, outputs: tuple[tuple[tuple[int, ...], Any], ...]) -> list[Any]:
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in outputs]


work.def_abstract_eval(_shapes)


class Opaque:
    """An engine whose rounds are single operations of a traced program.

    shapes(x, n) gives the leaves and the structure of what n clients remember of an x.
    """

    def __init__(self, engine: Any, watch: Watch, shapes: Callable[[Any, int], Any]) -> None:
        self._shapes = shapes
        self.problem: BilevelProblem = engine.problem
        self.clients: Clients = engine.clients
        self.capabilities: Capabilities = dataclasses.replace(engine.capabilities, states=None)
        self._watch = watch
        self._memories: dict[tuple[int, Cohort | None], tuple[list[Any], Any]] = {}
        self.result: Any = None  # the mean of the last round

    def replies(self, call: Call) -> Iterator[Replies]:
        self._refuse(call)
        watch, lead = self._watch, (len(call.clients),)
        cohort = None
        if len(call.clients) < self.clients.count:
            cohort = Cohort(call.drawn - watch.rounds, len(call.clients))
        given: dict[tuple[str, str], Any] = {("held", name): held.value for name, held in call.held.items()}
        given |= {("array", name): value for name, value in call.arrays.items()}
        given |= {("rows", name): _rows(each.values) for name, each in call.rows.items()}
        leaves, memory = self._memory(call, cohort)
        local = call.kind is Kind.LOCAL
        start, own = (watch.local if local else watch.rounds), call.address.place
        others = {name: place_of(descriptor) for name, descriptor in call.samples.items()}
        places = {name: (own if place is None else place) - start for name, place in others.items()}
        bare = dataclasses.replace(call, held={}, arrays={}, rows={}, kept={})
        node = Round(bare, tuple(given), places, cohort, memory)
        fields = expect(call, self.problem).fields
        outputs = tuple(((*lead, *shape) if local else shape, np.dtype(np.float32)) for shape in fields.values())
        results = self._bind(node, [*given.values(), *leaves], outputs)
        made = dict(zip(fields, results, strict=True))
        empty = dict.fromkeys(call.step.reply)
        whole = call.step.reply_type(**empty | made)
        if local:
            yield Replies(clients=call.clients, reply=whole, sound=True)
            return
        held = tuple((h.version, h.value.nbytes) for h in call.held.values())
        watch.bills.append(Bill(call.step.name, cohort, held))
        if watch.first is None:
            watch.first = set(call.held)
        self.result = whole
        stacked = {name: np.broadcast_to(np.float32(0), (*lead, *shape)) for name, shape in fields.items()}
        yield Replies(clients=call.clients, reply=call.step.reply_type(**empty | stacked))

    def close(self) -> None:
        """There is nothing to release."""

    def _bind(self, node: Round | Remember, inputs: list[Any], outputs: tuple[Any, ...]) -> list[Any]:
        self._watch.nodes.append(node)
        made: list[Any] = work.bind(*inputs, number=len(self._watch.nodes) - 1, outputs=outputs)
        return made

    def _memory(self, call: Call, cohort: Cohort | None) -> tuple[list[Any], Any]:
        """What the clients of this cohort remember of the held x: the arrays, and their structure or None."""
        held = call.held.get("x")
        if held is None:
            return [], None
        key = held.version, cohort
        if key not in self._memories:
            x = jax.ShapeDtypeStruct(np.shape(held.value), jnp.result_type(held.value))
            leaves, tree = self._shapes(x, len(call.clients))
            outputs = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
            bound = self._bind(Remember(cohort), [held.value], outputs) if leaves else []
            self._memories[key] = bound, tree if leaves else None
        return self._memories[key]

    def _refuse(self, call: Call) -> None:
        wrong = None
        if call.step.kept or expect(call, self.problem).asked:
            wrong = f"clients keep a state of their own in step {call.step.name}"
        elif any(field.form is Form.YY for field in call.step.sent.values()) and not call.even:
            wrong = f"clients send different numbers of matrices in step {call.step.name}"
        if wrong is not None:
            raise unfit(wrong)


class Taken:
    """The accumulator of a traced round, whose operation returns the mean itself."""

    def __init__(self, engine: Opaque) -> None:
        self._engine, self.count = engine, 0

    def add(self, replies: Replies, weights: np.ndarray) -> dict[int, Any]:
        """Count the replies. Whether they are finite is found when the program runs."""
        self.count += len(replies.clients)
        return {}

    @property
    def value(self) -> Any:
        return self._engine.result


class Watched:
    """A federation as a method sees it that is traced; the choices of the server are noted."""

    def __init__(self, fed: Federation, watch: Watch) -> None:
        self._fed, self._watch = fed, watch

    @property
    def engine(self) -> Any:
        return self._fed.engine

    @property
    def ledger(self) -> Ledger:
        return self._fed.ledger

    @property
    def clients(self) -> Sequence[int]:
        return self._fed.clients

    @property
    def seed(self) -> Any:
        return self._fed.seed

    @property
    def noted(self) -> dict[str, Array]:
        return self._fed.noted

    @property
    def policies(self) -> Any:
        return self._fed.policies

    def cohort(self, participation: int | float) -> Watched:
        return Watched(self._fed.cohort(participation), self._watch)

    def next_phase(self) -> None:
        self._fed.next_phase()

    def hold(self, **vectors: Array) -> None:
        self._watch.held.update(vectors)
        self._fed.hold(**vectors)

    def release(self, *names: str) -> None:
        self._watch.held.difference_update(names)
        self._fed.release(*names)

    def note(self, **vectors: Array | None) -> None:
        self._fed.note(**vectors)

    def show_series(self, series: Any) -> None:
        """What a traced iteration would show has no values, so a run is not advised from it."""

    def settle(self) -> None:
        """A traced iteration is in no checkpoint."""

    def round(self, step: Step[Any, Any], **arguments: Any) -> Any:
        return self._fed.round(step, **arguments)

    def call(self, *arguments: Any, **named: Any) -> Call:
        return self._fed.call(*arguments, **named)

    def probe(self, step: Step[Any, Any], *arguments: Any, **named: Any) -> Any:
        raise unfit(f"it measures {step.name} within an iteration")

    def rng(self, name: str) -> Any:
        self._watch.generators += 1
        return _Noted(self._fed.rng(name), name, self._fed.ledger.rounds - self._watch.rounds, self._watch)


class _Noted:
    """A generator whose results are noted. They decide what the iteration does, and so which program it is."""

    def __init__(self, generator: np.random.Generator, name: str, after: int, watch: Watch) -> None:
        self._generator, self._name, self._after = generator, name, after
        self._watch, self._number = watch, watch.generators

    def __getattr__(self, method: str) -> Any:
        def noted(*arguments: Any, **named: Any) -> Any:
            choice = Choice(self._number, self._name, self._after, method, arguments, tuple(sorted(named.items())))
            result = choice.made(self._generator)
            self._watch.choices.append((choice, result))
            return result

        return noted


def _rows(values: Any) -> Any:
    return values.astype(jnp.float32) if isinstance(values, Array) else np.asarray(values, np.float32)
