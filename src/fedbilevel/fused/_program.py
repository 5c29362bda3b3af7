"""The program that runs tapes: a loop over instructions, with one branch for every piece.

The rows of all draws, the cohorts and the instructions of a block are inputs of the program. Whether every reply
of the block was finite is an output.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from ..aggregate import TracedRule, all_finite, finite_mean
from ..engines import Held, perform
from ..oracle import Arrays
from ..problem import BilevelProblem, Over
from ..rng import Kind
from ..steps import Chances, Moving, present, whole
from ._single import compiled
from ._tape import Form, Piece, Register, Tape, descriptor_key, forms
from ._watch import Remember, Round

BEGIN = 0  # the branch that puts the state into registers
# The columns of an instruction: its branch, its cohort, its place in the stack of its draws, and then registers.
BRANCH, COHORT, PLACE, REGISTERS = range(4)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class Alike:
    """An array of a client that has one number everywhere, the same for all clients. It is part of the program."""

    number: float | bool
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def instead(cls, stacked: np.ndarray) -> Any:
        """This instead of what the clients have, if that is possible."""
        first = stacked.ravel()[:1]
        if first.size and (stacked == first).all():
            return cls(first[0].item(), stacked.shape[1:], stacked.dtype.str)
        return jnp.asarray(stacked)

    @classmethod
    def filled(cls, tree: Any) -> Any:
        """A tree of one client with the arrays that are meant. They are known while the program is traced."""
        return jax.tree.map(
            lambda a: np.full(a.shape, a.number, a.dtype) if isinstance(a, cls) else a,
            tree,
            is_leaf=lambda a: isinstance(a, cls),
        )


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
    ended    how many iterations ended while every reply was finite
    """

    state: tuple[Array, ...]
    before: tuple[Array, ...]
    notes: dict[str, Array]
    sound: Array
    ended: Array


class ManyBlock(NamedTuple):
    """The instructions of a block of many runs, and what is drawn for it.

    Runs with the same seed have the same instructions and draws: they are on one track. An instruction is done by
    the tracks that `wanted` names. If they all do every instruction, `wanted` is None.

    length   the number of instructions; the arrays may be longer
    code     the instructions; cohorts and places in it are not used
    places   for each instruction and track, its cohort and its place in the stack of its draws
    cohorts  the clients of every cohort, by track
    moving   the rows that are drawn, by track
    """

    length: Any
    code: Any
    places: Any
    wanted: Any
    cohorts: dict[int, Any]
    moving: dict[str, Any]


class At(NamedTuple):
    """An instruction as it is done: its row of the code, the place of its cohort and of its draws.

    wanted   whether it is done at all; None: it is
    """

    row: Array
    cohort: Array
    place: Array
    wanted: Array | None = None


def group_of(node: Round) -> str | None:
    """The name of the stack in which the draws of a call are; None if it draws nothing."""
    call = node.call
    drawn = "; ".join(f"{name}: {descriptor_key(descriptor)}" for name, descriptor in call.samples.items())
    return f"{call.kind.value} of {len(call.clients)}: {drawn}" if drawn else None


class Program:
    """A program for a set of tapes. It grows with every tape that is added, and is then compiled again.

    `rule` aggregates the replies of a round; None means their mean.
    """

    def __init__(
        self, problem: BilevelProblem, over: Over, state: Sequence[Form], small: bool, rule: TracedRule | None
    ) -> None:
        self._problem, self._over, self._small, self._rule = problem, over, small, rule
        self._state = tuple(state)
        self._pieces: dict[Any, int] = {}
        self._ends: dict[Any, int] = {}
        self._branches: list[Callable[..., Any]] = [self._begin]
        self._registers: dict[Form, int] = {}
        self._notes: dict[str, Form] = {}
        self._compiled: dict[Any, Any] = {}  # by the shapes of what is given
        self._bytes: dict[Any, int] = {}  # that a run needs, by what the program consists of
        self.longest = 0
        self.seconds = 0.0  # spent on compiling programs of many runs

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
        return self._called(shapes, leaves)

    def start_many(self, state: tuple[Any, ...]) -> Outcome:
        """The outcome of a block without iterations, from which the first part of a block begins."""
        lead = state[0].shape[:2]
        notes = {name: np.zeros((*lead, *form.shape), form.dtype) for name, form in self._notes.items()}
        return Outcome(state, state, notes, np.ones(lead, bool), np.zeros(lead, np.int32))  # type: ignore[arg-type]

    def run_many(self, given: Given, before: Outcome, block: ManyBlock, mesh: Mesh | None) -> Outcome:
        """Run a part of a block of many runs.

        All values of an outcome have two leading axes: tracks, and the runs of a track. A run in which a reply was
        not finite stays as it was before that iteration. With a mesh, the runs are spread over its devices by the
        axis that it is named after.
        """
        if mesh is not None:  # a program is compiled anew for values that lie elsewhere
            before = jax.device_put(before, NamedSharding(mesh, _along(mesh)))
        leaves = jax.tree.leaves((given, before, block))
        shapes = block.wanted is None, mesh, tuple((np.shape(leaf), leaf.dtype) for leaf in leaves)
        if shapes not in self._compiled:
            function: Any = self._traced_many
            if mesh is not None:
                by_track = mesh.axis_names[0] == "tracks"
                runs, places = _along(mesh), P(None, "tracks") if by_track else P()
                tracks = P("tracks") if by_track else P()
                spread = ManyBlock(P(), P(), places, places, tracks, tracks)  # type: ignore[arg-type]
                function = jax.shard_map(
                    function, mesh=mesh, in_specs=(P(), runs, spread), out_specs=runs, check_vma=False
                )
            start = time.perf_counter()
            traced, result = jax.make_jaxpr(function, return_shape=True)(given, before, block)
            self._compiled[shapes] = compiled(traced, self._small), jax.tree.structure(result)
            first = self._called(shapes, leaves)  # it returns when the program is compiled, and before it has run
            self.seconds += time.perf_counter() - start
            return first
        return self._called(shapes, leaves)

    def _called(self, shapes: Any, leaves: list[Any]) -> Outcome:
        program, structure = self._compiled[shapes]
        made: Outcome = jax.tree.unflatten(structure, program(*leaves))
        return made

    def bytes_of_a_run(self, given: Given, state: tuple[Any, ...], block: Block) -> int:
        """About how many bytes a run needs: its registers, and all values of the largest branch."""
        grown = self.branches, *self._registers.items()
        if grown not in self._bytes:
            self._bytes = {grown: self._bytes_of_a_run(given, state, block)}
        return self._bytes[grown]

    def _bytes_of_a_run(self, given: Given, state: tuple[Any, ...], block: Block) -> int:
        start = self._start(state)
        row = jnp.zeros(self.longest, np.int32)
        at = At(row, row[0], row[0])
        largest = 0
        for branch in self._branches:
            traced = jax.make_jaxpr(lambda *carried, branch=branch: branch(given, block, at, *carried))(*start)
            largest = max(largest, _bytes(traced.jaxpr))
        return largest + sum(leaf.nbytes for leaf in jax.tree.leaves(start))

    def _traced_many(self, given: Given, before: Outcome, block: ManyBlock) -> Outcome:
        """All runs do an instruction at once. It does not depend on the run, so no other one is computed."""

        def spread(branch: Any) -> Any:
            def one(cohorts: Any, moving: Any, at: At, outcome: Outcome, banks: Any) -> Any:
                return branch(given, Block(None, None, cohorts, moving), at, outcome, banks)

            runs = jax.vmap(one, (None, None, None, 0, 0))
            wanted = None if block.wanted is None else 0
            return jax.vmap(runs, (0, 0, At(None, 0, 0, wanted), 0, 0))  # type: ignore[arg-type]

        branches = [
            lambda at, carried, branch=branch: branch(block.cohorts, block.moving, at, *carried)
            for branch in map(spread, self._branches)
        ]

        def body(number: Array, carried: Any) -> Any:
            row, places = block.code[number], block.places[number]
            wanted = None if block.wanted is None else block.wanted[number]
            at = At(row, places[:, 0], places[:, 1], wanted)
            return lax.switch(row[BRANCH], branches, at, carried)

        start = before, self._banks(*before.sound.shape)
        outcome: Outcome = lax.fori_loop(0, block.length, body, start)[0]
        return outcome

    def _banks(self, *lead: int) -> dict[Form, Array]:
        """The registers at the start of a block, with leading axes if there are many runs."""
        return {
            form: jnp.zeros((*lead, count, *form.shape), form.dtype) for form, count in self._registers.items()
        }

    def _start(self, state: tuple[Any, ...]) -> Any:
        notes = {name: jnp.zeros(form.shape, form.dtype) for name, form in self._notes.items()}
        return Outcome(state, state, notes, jnp.bool_(True), jnp.int32(0)), self._banks()

    def _traced(self, given: Given, state: tuple[Any, ...], block: Block) -> Outcome:
        start = self._start(state)
        branches = [
            lambda row, carried, branch=branch: branch(given, block, At(row, row[COHORT], row[PLACE]), *carried)
            for branch in self._branches
        ]

        def body(at: Array, carried: Any) -> Any:
            row = block.code[at]
            return lax.switch(row[BRANCH], branches, row, carried)

        outcome: Outcome = lax.fori_loop(0, block.length, body, start)[0]
        return outcome

    def _begin(self, given: Given, block: Block, at: At, outcome: Outcome, banks: Any) -> Any:
        banks = dict(banks)
        for number, (form, leaf) in enumerate(zip(self._state, outcome.state, strict=True)):
            banks[form] = _put(banks[form], leaf, at.row[REGISTERS + number], at.wanted)
        before = _chosen(at.wanted, outcome.state, outcome.before)
        return outcome._replace(before=before), banks

    def _end(self, tape: Tape) -> Callable[..., Any]:
        """The branch that takes the new state and the notes from the registers."""
        leaves = len(self._state)

        def branch(given: Given, block: Block, at: At, outcome: Outcome, banks: Any) -> Any:
            column, values = REGISTERS, []
            for result in tape.results:
                if isinstance(result, Register):
                    values.append(_take(banks[result.form], at.row[column]))
                    column += 1
                else:
                    values.append(jnp.asarray(result))
            # After a reply that is not finite, the state stays that of the last iteration before it.
            good = outcome.sound if at.wanted is None else outcome.sound & at.wanted
            notes = outcome.notes | dict(zip(tape.notes, values[leaves:], strict=True))
            state, notes = _chosen(good, (tuple(values[:leaves]), notes), (outcome.state, outcome.notes))
            ended = outcome.ended + good.astype(np.int32)
            return outcome._replace(state=state, notes=notes, ended=ended), banks

        return branch

    def _branch(self, piece: Piece) -> Callable[..., Any]:
        """The branch of a piece: read, let the clients work, compute at the server, write."""
        node = piece.node

        def branch(given: Given, block: Block, at: At, outcome: Outcome, banks: Any) -> Any:
            row = at.row
            read = [_take(banks[form], row[REGISTERS + i]) for i, form in enumerate(piece.inputs)]
            made, sound = list[Any](), outcome.sound
            if node is not None:
                sent = [read[value] if isinstance(value, int) else jnp.asarray(value) for value in piece.sent]
                made, finite = self._work(node, given, block, at, sent)
                sound = sound & (finite if at.wanted is None else jnp.where(at.wanted, finite, True))
            written = piece.server(*read, *made)
            banks, first = dict(banks), REGISTERS + len(piece.inputs)
            for i, (form, value) in enumerate(zip(piece.outputs, written, strict=True)):
                banks[form] = _put(banks[form], value, row[first + i], at.wanted)
            return outcome._replace(sound=sound), banks

        return branch

    def _work(
        self, node: Round | Remember, given: Given, block: Block, at: At, sent: list[Any]
    ) -> tuple[list[Any], Array]:
        """What the clients of a cohort return, and whether it is finite."""

        def own(tree: Any) -> Any:
            if node.cohort is None:
                return tree
            ids = block.cohorts[node.cohort.size][at.cohort]
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
        draws = self._draws(node, own(given.still), block, at.place, chances)

        def one(shared: Any, each: Any) -> Any:
            vectors, arrays = shared
            rows, draws, data, memory = each
            return perform(self._problem, call, vectors, arrays, rows, Alike.filled(draws), {}, data, memory)[0]

        replies = self._each(one, (vectors, arrays), (own(rows), draws, data, memory))
        leaves = jax.tree.leaves(replies)
        typed = jnp.bool_(all(a.dtype == jnp.float32 for a in leaves))
        values = [a.astype(jnp.float32) for a in leaves]
        if call.kind is Kind.LOCAL:
            return leaves, all_finite(values) & typed
        if self._rule is None:
            finite, means = finite_mean(values, own(given.weights))
            return means, finite & typed
        held = {name: Held(0, value, ()) for name, value in vectors.items()}
        before = dataclasses.replace(call, held=held, arrays=arrays).before
        stacked = zip(present(replies), values, strict=True)
        made = [self._ruled(self._rule, a, before.get(name), own(given.weights)) for name, a in stacked]
        return made, all_finite(values) & typed

    def _ruled(self, rule: TracedRule, stacked: Array, before: Array | None, weights: Array) -> Array:
        """What a rule makes of a field. For the next value of a vector it is given the differences to it."""
        rows = stacked.reshape(len(stacked), -1)
        if before is None:
            return rule(rows, weights).reshape(stacked.shape[1:])
        return before + rule(rows - before, weights)

    def _draws(
        self, node: Round, still: Any, block: Block, place: Array, chances: Chances | None
    ) -> dict[str, Any]:
        group = group_of(node)
        moving = block.moving.get(group or "")
        drawn = {}
        for name, descriptor in node.call.samples.items():
            part = Moving(None, None)
            if moving is not None and name in moving:
                part = jax.tree.map(lambda a: a[place], moving[name])
                part = part._replace(index=None if part.index is None else part.index.astype(np.int32))
            drawn[name] = whole(still[descriptor_key(descriptor)], part, chances)
        return drawn

    def _each(self, function: Any, shared: Any, each: Any) -> Any:
        if self._over == "vmap":
            return jax.vmap(function, in_axes=(None, 0))(shared, each)
        return lax.map(lambda one: function(shared, one), each)


def _along(mesh: Mesh) -> P:
    """How the values of all runs are spread over the devices of a mesh."""
    return P("tracks") if mesh.axis_names[0] == "tracks" else P(None, "runs")


def _bytes(jaxpr: Any) -> int:
    """The bytes of all values that a program computes, those of a loop once."""
    made = 0
    for equation in jaxpr.eqns:
        made += sum(v.aval.size * v.aval.dtype.itemsize for v in equation.outvars)
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                if isinstance(part, ClosedJaxpr | Jaxpr):
                    made += _bytes(part.jaxpr if isinstance(part, ClosedJaxpr) else part)
    return made


def _take(bank: Array, number: Array) -> Array:
    return bank[0] if bank.shape[0] == 1 else lax.dynamic_index_in_dim(bank, number, keepdims=False)


def _put(bank: Array, value: Any, number: Array, wanted: Array | None) -> Array:
    value = jnp.asarray(value, bank.dtype)
    if wanted is not None:
        value = jnp.where(wanted, value, _take(bank, number))
    return value[None] if bank.shape[0] == 1 else lax.dynamic_update_index_in_dim(bank, value, number, 0)


def _chosen(which: Array | None, new: Any, old: Any) -> Any:
    return new if which is None else jax.tree.map(lambda a, b: jnp.where(which, a, b), new, old)
