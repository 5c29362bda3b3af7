"""The program that runs tapes: a loop over instructions, with one branch for every piece.

The rows of all draws, the cohorts and the instructions of a block are inputs of the program. Whether every reply
of the block was finite is an output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from ..aggregate import finite_mean
from ..engines import perform
from ..oracle import Arrays
from ..problem import BilevelProblem, Over
from ..rng import Kind
from ..steps import Chances, Moving, whole
from ._single import compiled
from ._tape import Form, Piece, Register, Tape, descriptor_key, forms
from ._watch import Remember, Round

BEGIN = 0  # the branch that puts the state into registers
# The columns of an instruction: its branch, its cohort, its place in the stack of its draws, and then registers.
BRANCH, COHORT, PLACE, REGISTERS = range(4)


class Given(NamedTuple):
    """What the clients of a program have: their data, their weights, and by descriptor the still part of draws."""

    data: Arrays
    weights: Array
    still: dict[str, Any]


class Block(NamedTuple):
    """The instructions of a block, and what is drawn for it.

    length   the number of instructions; the arrays may be longer
    code     the instructions
    cohorts  the clients of every cohort
    moving   the rows that are drawn, by the group of calls that draw alike
    """

    length: Any
    code: Any
    cohorts: dict[int, Any]
    moving: dict[str, Any]


class Outcome(NamedTuple):
    """What a block leads to.

    before   the state before the last iteration
    notes    what was noted in the last iteration
    sound    whether every reply was finite
    """

    state: tuple[Array, ...]
    before: tuple[Array, ...]
    notes: dict[str, Array]
    sound: Array


def group_of(node: Round) -> str | None:
    """The name of the stack in which the draws of a call are; None if it draws nothing."""
    call = node.call
    drawn = "; ".join(f"{name}: {descriptor_key(descriptor)}" for name, descriptor in call.samples.items())
    return f"{call.kind.value} of {len(call.clients)}: {drawn}" if drawn else None


class Program:
    """A program for a set of tapes. It grows with every tape that is added, and is then compiled again."""

    def __init__(self, problem: BilevelProblem, over: Over, state: Sequence[Form], small: bool) -> None:
        self._problem, self._over, self._small = problem, over, small
        self._state = tuple(state)
        self._pieces: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}
        self._branches: list[Callable[..., Any]] = [self._begin]
        self._registers: dict[Form, int] = {}
        self._notes: dict[str, Form] = {}
        self._compiled: dict[Any, Any] = {}  # by the shapes of what is given
        self.longest = 0

    @property
    def branches(self) -> int:
        """The number of different pieces."""
        return len(self._branches)

    def add(self, tape: Tape) -> np.ndarray:
        """Make the program able to run a tape; return the tape's code, in which cohorts and places are zero."""
        for form, count in forms(tape).items():
            if self._registers.get(form, 0) < count:
                self._registers[form] = count
                self._compiled.clear()
        leaves = len(self._state)
        for name, result in zip(tape.notes, tape.results[leaves:], strict=True):
            form = result.form if isinstance(result, Register) else Form(result.shape, result.dtype)
            if self._notes.setdefault(name, form) != form:
                raise ValueError(f"the note {name} has different shapes")
        rows = [[BEGIN, 0, 0, *(r.number for r in tape.state)]]
        for piece, reads, writes in tape.instructions:
            if piece.key not in self._pieces:
                self._pieces[piece.key] = len(self._branches)
                self._branches.append(self._branch(piece))
                self._compiled.clear()
            rows.append([self._pieces[piece.key], 0, 0, *(r.number for r in (*reads, *writes))])
        known = [r for r in tape.results if isinstance(r, Register)]
        end = tape.notes, tuple(r.form if isinstance(r, Register) else r.tobytes() for r in tape.results)
        if end not in self._ends:
            self._ends[end] = len(self._branches)
            self._branches.append(self._end(tape))
            self._compiled.clear()
        rows.append([self._ends[end], 0, 0, *(r.number for r in known)])
        self.longest = max(self.longest, *map(len, rows))
        code = np.zeros((len(rows), self.longest), np.int32)
        for at, row in enumerate(rows):
            code[at, : len(row)] = row
        return code

    def run(self, given: Given, state: tuple[Any, ...], block: Block) -> Outcome:
        """Run a block from a state."""
        leaves = jax.tree.leaves((given, state, block))
        shapes = tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)
        if shapes not in self._compiled:
            traced, result = jax.make_jaxpr(self._traced, return_shape=True)(given, state, block)
            self._compiled[shapes] = compiled(traced, self._small), jax.tree.structure(result)
        program, structure = self._compiled[shapes]
        made: Outcome = jax.tree.unflatten(structure, program(*leaves))
        return made

    def _traced(self, given: Given, state: tuple[Any, ...], block: Block) -> Outcome:
        banks = {form: jnp.zeros((count, *form.shape), form.dtype) for form, count in self._registers.items()}
        notes = {name: jnp.zeros(form.shape, form.dtype) for name, form in self._notes.items()}
        start = Outcome(state, state, notes, jnp.bool_(True)), banks
        branches = [
            lambda row, carried, branch=branch: branch(given, block, row, *carried) for branch in self._branches
        ]

        def body(at: Array, carried: Any) -> Any:
            row = block.code[at]
            return lax.switch(row[BRANCH], branches, row, carried)

        outcome: Outcome = lax.fori_loop(0, block.length, body, start)[0]
        return outcome

    def _begin(self, given: Given, block: Block, row: Array, outcome: Outcome, banks: Any) -> Any:
        banks = dict(banks)
        for at, (form, leaf) in enumerate(zip(self._state, outcome.state, strict=True)):
            banks[form] = _put(banks[form], leaf, row[REGISTERS + at])
        return outcome._replace(before=outcome.state), banks

    def _end(self, tape: Tape) -> Callable[..., Any]:
        """The branch that takes the new state and the notes from the registers."""
        leaves = len(self._state)

        def branch(given: Given, block: Block, row: Array, outcome: Outcome, banks: Any) -> Any:
            at, values = REGISTERS, []
            for result in tape.results:
                if isinstance(result, Register):
                    values.append(_take(banks[result.form], row[at]))
                    at += 1
                else:
                    values.append(jnp.asarray(result))
            notes = outcome.notes | dict(zip(tape.notes, values[leaves:], strict=True))
            return outcome._replace(state=tuple(values[:leaves]), notes=notes), banks

        return branch

    def _branch(self, piece: Piece) -> Callable[..., Any]:
        """The branch of a piece: read, let the clients work, compute at the server, write."""
        node = piece.node

        def branch(given: Given, block: Block, row: Array, outcome: Outcome, banks: Any) -> Any:
            read = [_take(banks[form], row[REGISTERS + at]) for at, form in enumerate(piece.inputs)]
            made, sound = list[Any](), outcome.sound
            if node is not None:
                sent = [read[value] if isinstance(value, int) else jnp.asarray(value) for value in piece.sent]
                made, finite = self._work(node, given, block, row, sent)
                sound = sound & finite
            written = piece.server(*read, *made)
            banks, first = dict(banks), REGISTERS + len(piece.inputs)
            for at, (form, value) in enumerate(zip(piece.outputs, written, strict=True)):
                banks[form] = _put(banks[form], value, row[first + at])
            return outcome._replace(sound=sound), banks

        return branch

    def _work(
        self, node: Round | Remember, given: Given, block: Block, row: Array, sent: list[Any]
    ) -> tuple[list[Any], Array]:
        """What the clients of a cohort return, and whether it is finite."""

        def own(tree: Any) -> Any:
            if node.cohort is None:
                return tree
            ids = block.cohorts[node.cohort.size][row[COHORT]]
            return jax.tree.map(lambda a: a[ids], tree)

        data = own(given.data)
        if isinstance(node, Remember):
            made = self._each(lambda x, one: self._problem.remember(x, one), sent[0], data)
            return jax.tree.leaves(made), jnp.bool_(True)
        call, chances = node.call, self._problem.chances
        named = dict(zip(node.inputs, sent, strict=False))
        vectors, arrays, rows = (
            {name: jnp.asarray(value) for (use, name), value in named.items() if use == wanted}
            for wanted in ("held", "array", "rows")
        )
        memory = None if node.memory is None else jax.tree.unflatten(node.memory, sent[len(node.inputs) :])
        draws = self._draws(node, own(given.still), block, row, chances)

        def one(shared: Any, each: Any) -> Any:
            vectors, arrays = shared
            rows, draws, data, memory = each
            return perform(self._problem, call, vectors, arrays, rows, draws, {}, data, memory)[0]

        replies = self._each(one, (vectors, arrays), (own(rows), draws, data, memory))
        leaves = jax.tree.leaves(replies)
        finite, means = finite_mean([a.astype(jnp.float32) for a in leaves], own(given.weights))
        typed = jnp.bool_(all(a.dtype == jnp.float32 for a in leaves))
        return leaves if call.kind is Kind.LOCAL else means, finite & typed

    def _draws(self, node: Round, still: Any, block: Block, row: Array, chances: Chances | None) -> dict[str, Any]:
        group = group_of(node)
        moving = block.moving.get(group or "")
        drawn = {}
        for name, descriptor in node.call.samples.items():
            part = Moving(None, None)
            if moving is not None and name in moving:
                part = jax.tree.map(lambda a: a[row[PLACE]], moving[name])
            drawn[name] = whole(still[descriptor_key(descriptor)], part, chances)
        return drawn

    def _each(self, function: Any, shared: Any, each: Any) -> Any:
        if self._over == "vmap":
            return jax.vmap(function, in_axes=(None, 0))(shared, each)
        return lax.map(lambda one: function(shared, one), each)


def _take(bank: Array, number: Array) -> Array:
    return bank[0] if bank.shape[0] == 1 else lax.dynamic_index_in_dim(bank, number, keepdims=False)


def _put(bank: Array, value: Any, number: Array) -> Array:
    value = jnp.asarray(value, bank.dtype)
    return value[None] if bank.shape[0] == 1 else lax.dynamic_update_index_in_dim(bank, value, number, 0)
