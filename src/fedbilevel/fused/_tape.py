"""An outer iteration as a tape of instructions.

The traced iteration is cut before every operation of the clients. A piece is one operation and what the server
computes after it. Pieces that do the same on other values are one `Piece`, and an instruction says from which
registers it reads and to which it writes. So a program needs every piece only once, however many rounds an
iteration has, and iterations that differ in a choice of the server are different tapes for the same program.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jax.extend.core import ClosedJaxpr, DropVar, Jaxpr, Literal, jaxpr_as_fun

from ..steps import Descriptor, PerClient, Samples
from ._watch import Cohort, Remember, Round, work


class Form(NamedTuple):
    """The shape and type of the values that a register can have."""

    shape: tuple[int, ...]
    dtype: Any


class Register(NamedTuple):
    """A place for a value: the form of the values, and a number among the registers of this form."""

    form: Form
    number: int


@dataclass(frozen=True)
class Piece:
    """An operation of the clients, if there is one, and what the server computes after it.

    key       pieces with equal keys do the same
    node      the operation, whose inputs are `sent`: places among the inputs of the piece, or constants
    inputs    the forms of the values that are read
    outputs   the forms of the values that are written
    server    server(*inputs, *results of the operation) gives the outputs
    """

    key: Any
    node: Round | Remember | None
    sent: tuple[int | np.ndarray, ...]
    inputs: tuple[Form, ...]
    outputs: tuple[Form, ...]
    server: Callable[..., Sequence[Any]]


class Instruction(NamedTuple):
    """A piece with the registers that it reads and writes."""

    piece: Piece
    reads: tuple[Register, ...]
    writes: tuple[Register, ...]

    @property
    def cohort(self) -> Cohort | None:
        node = self.piece.node
        return None if node is None else node.cohort


@dataclass(frozen=True)
class Tape:
    """The instructions of an outer iteration.

    state     the registers into which the state is put before the first instruction
    results   for each leaf of the new state, and then for each note, the register or the constant that has it
    """

    instructions: tuple[Instruction, ...]
    state: tuple[Register, ...]
    results: tuple[Register | np.ndarray, ...]
    notes: tuple[str, ...]


def make_tape(traced: ClosedJaxpr, nodes: Sequence[Round | Remember], notes: tuple[str, ...]) -> Tape:
    """Cut a traced iteration into pieces, and give its values registers."""
    jaxpr, consts = traced.jaxpr, dict(zip(traced.jaxpr.constvars, traced.consts, strict=True))
    groups: list[list[Any]] = [[]]
    for equation in jaxpr.eqns:
        if equation.primitive is work:
            groups.append([])
        groups[-1].append(equation)
    last: dict[Any, int] = {}  # the last group in which a value is used
    for number, group in enumerate(groups):
        for equation in group:
            last.update((v, number) for v in _variables(equation.invars))
    last.update((v, len(groups)) for v in _variables(jaxpr.outvars))
    free = _Registers()
    places = {v: free.take(_form(v)) for v in jaxpr.invars}
    state = tuple(places.values())
    instructions = []
    for number, group in enumerate(groups):
        if not group:
            continue
        made = dict.fromkeys(v for equation in group for v in equation.outvars)
        used = dict.fromkeys(v for e in group for v in _variables(e.invars) if v not in made and v not in consts)
        kept = [v for v in made if last.get(v, -1) > number]
        reads = tuple(places[v] for v in used)
        for v in used:
            if last[v] == number:
                free.give(places[v])
        for v in kept:
            places[v] = free.take(_form(v))
        own = {v: consts[v] for equation in group for v in _variables(equation.invars) if v in consts}
        piece = _piece(jaxpr, group, nodes, list(used), kept, own)
        instructions.append(Instruction(piece, reads, tuple(places[v] for v in kept)))
    results = tuple(
        np.asarray(v.val if isinstance(v, Literal) else consts[v], v.aval.dtype)
        if isinstance(v, Literal) or v in consts
        else places[v]
        for v in jaxpr.outvars
    )
    return Tape(tuple(instructions), state, results, notes)


class _Registers:
    """Registers that are free again as soon as nothing reads their value any more."""

    def __init__(self) -> None:
        self._free: dict[Form, list[int]] = {}
        self._made: dict[Form, int] = {}

    def take(self, form: Form) -> Register:
        free = self._free.setdefault(form, [])
        if free:
            return Register(form, free.pop())
        self._made[form] = self._made.get(form, 0) + 1
        return Register(form, self._made[form] - 1)

    def give(self, register: Register) -> None:
        self._free.setdefault(register.form, []).append(register.number)


def _form(variable: Any) -> Form:
    return Form(tuple(variable.aval.shape), np.dtype(variable.aval.dtype))


def _variables(values: Iterable[Any]) -> list[Any]:
    return [v for v in values if not isinstance(v, Literal)]


def _piece(
    jaxpr: Jaxpr,
    group: list[Any],
    nodes: Sequence[Round | Remember],
    inputs: list[Any],
    outputs: list[Any],
    consts: dict[Any, Any],
) -> Piece:
    names: dict[Any, Any] = {v: ("input", i, _form(v)) for i, v in enumerate(inputs)}
    names |= {v: ("const", _digest(value)) for v, value in consts.items()}
    key = list[Any]()
    for equation in group:
        given = tuple(
            ("literal", str(v.aval), np.asarray(v.val).tobytes()) if isinstance(v, Literal) else names[v]
            for v in equation.invars
        )
        if equation.primitive is work:
            what = _node_key(nodes[equation.params["number"]]), equation.params["outputs"]
        else:
            what = equation.primitive.name, _parameters(equation.params)
        key.append((what, given))
        names |= {v: ("value", len(names) + i) for i, v in enumerate(equation.outvars)}
    key.append(tuple(names[v] for v in outputs))
    node, sent, results = None, list[int | np.ndarray](), list[Any]()
    if group[0].primitive is work:
        node, results = nodes[group[0].params["number"]], list(group[0].outvars)
        for v in group[0].invars:
            known = v.val if isinstance(v, Literal) else consts.get(v)
            sent.append(inputs.index(v) if known is None else np.asarray(known, v.aval.dtype))
    used = [v for v in results if not isinstance(v, DropVar)]
    rest = jaxpr.replace(
        constvars=list(consts), invars=[*inputs, *used], outvars=outputs, eqns=group if node is None else group[1:]
    )
    after = jaxpr_as_fun(ClosedJaxpr(rest, list(consts.values())))
    taken = [not isinstance(v, DropVar) for v in results]

    def server(*values: Any) -> Sequence[Any]:
        made = values[len(inputs) :]
        return after(*values[: len(inputs)], *(a for a, wanted in zip(made, taken, strict=True) if wanted))

    return Piece(tuple(key), node, tuple(sent), tuple(map(_form, inputs)), tuple(map(_form, outputs)), server)


def _node_key(node: Round | Remember) -> Any:
    count = None if node.cohort is None else node.cohort.size
    if isinstance(node, Remember):
        return "remember", count
    call = node.call
    samples = tuple((name, descriptor_key(d)) for name, d in call.samples.items())
    return call.step, tuple(sorted(call.constants.items())), node.inputs, call.kind, samples, count


def descriptor_key(descriptor: Descriptor) -> str:
    """What the shape of a draw depends on. It matters whether rows are taken again, but not of which round."""
    if not isinstance(descriptor, Samples):
        return repr(descriptor)
    count = descriptor.count
    steps = _digest(count.values) if isinstance(count, PerClient) else count
    return f"{descriptor.part} {descriptor.size} {steps} {'again' if descriptor.of is not None else ''}"


def _parameters(parameters: dict[str, Any]) -> str:
    """The parameters of an equation as text, with the constants of the functions among them."""
    parts = []
    for name, value in sorted(parameters.items()):
        consts = [_digest(c) for c in value.consts] if isinstance(value, ClosedJaxpr) else []
        body = value.jaxpr if isinstance(value, ClosedJaxpr) else value
        parts.append(f"{name}={body if isinstance(body, Jaxpr) else repr(body)}{consts}")
    return " ".join(parts)


def _digest(value: Any) -> str:
    array = np.asarray(value)
    return f"{array.dtype}{array.shape}{hashlib.sha256(array.tobytes()).hexdigest()}"


def forms(tape: Tape) -> dict[Form, int]:
    """How many registers of each form a tape needs."""
    found: dict[Form, int] = {}
    used = [*tape.state, *(r for i in tape.instructions for r in (*i.reads, *i.writes))]
    for register in used:
        found[register.form] = max(found.get(register.form, 0), register.number + 1)
    return found
