"""Many outer iterations at once.

A block is run as one program. What is random in it is drawn ahead on the host, at the addresses at which the
rounds would draw it one by one, so the result is the same up to rounding. A long block is cut into parts, and the
rows of a part are drawn while the part before it is computed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .. import rng
from ..aggregate import traced_rule
from ..engines import Fusible
from ..errors import FedBilevelError, StepError
from ..federation import Federation, drawn_clients
from ..native import smallest_type
from ..rng import Address, Kind
from ..schedules import decay_of, scheduled
from ..settings import is_settings, numbers_of, with_numbers
from ..steps import Calls, Descriptor, Rows, draw, draw_ahead, moving_part, still_part
from ._books import Books, Entry, entries, holding, ledger_at
from ._program import COHORT, PLACE, Alike, Block, Given, Program, group_of
from ._tape import Form, Tape, descriptor_key, make_tape
from ._watch import Bill, Choice, Cohort, Opaque, Round, Taken, Watch, Watched, unfit

LONGEST = 64  # the most iterations of a part of a block
DRAWS = 2**24  # the most bytes of drawn rows of a part
AHEAD = 64  # so many iterations are looked at before the first program is compiled
PIECES = 60  # a program with more different pieces is refused
SMALL = 2**20  # clients whose data take fewer bytes work in a program for small operations


class Done(NamedTuple):
    """The result of a block: the state, the state before the last iteration, and the number of iterations."""

    state: Any
    before: Any
    iterations: int


class Sampled(NamedTuple):
    """The draws of one argument in a group of calls: the places of the calls, and their cohorts."""

    descriptor: Descriptor
    kind: Kind
    places: np.ndarray
    cohorts: tuple[Cohort | None, ...]


@dataclass(frozen=True)
class Recorded:
    """An outer iteration that was traced.

    code      its instructions, in which cohorts and places are zero
    entries   what it costs without the vectors that clients hold, and `bills` the rounds in which they hold some
    rounds    how many rounds it has, and `local` how many calls without communication
    cohorted  the rows of the code that have a cohort, and which one
    grouped   by group, the rows of the code that draw
    sampled   by group and argument, what they draw
    """

    tape: Tape
    code: np.ndarray
    entries: dict[str, Entry]
    bills: tuple[Bill, ...]
    rounds: int
    local: int
    cohorts: tuple[Cohort, ...]
    cohorted: tuple[tuple[int, Cohort], ...]
    grouped: dict[str, np.ndarray]
    sampled: dict[str, dict[str, Sampled]]


@dataclass
class Fork:
    """A choice of the server, and the iterations that it leads to."""

    choice: Choice
    ways: dict[Any, Any]


class Planned(NamedTuple):
    """An iteration of a block, with the number of rounds, of local calls and of iterations before it."""

    recorded: Recorded
    rounds: int
    local: int
    iteration: int


class Used(NamedTuple):
    """An iteration that was recorded, and where a block has it.

    at       the rows of the block's code at which it begins
    rounds   the numbers of rounds before it, and `local` those of local calls
    """

    recorded: Recorded
    at: np.ndarray
    rounds: np.ndarray
    local: np.ndarray

    def rows(self, own: np.ndarray) -> np.ndarray:
        """The rows of the block's code for rows of its own code."""
        return np.add.outer(self.at, own).ravel()

    def starts(self, sampled: Sampled) -> np.ndarray:
        """The places of its calls that draw an argument."""
        before = self.local if sampled.kind is Kind.LOCAL else self.rounds
        return np.add.outer(before, sampled.places).ravel()


def _used(planned: Sequence[Planned]) -> tuple[list[Used], int]:
    """The different iterations of a block, and the length of its code."""
    known = {id(each.recorded): each.recorded for each in planned}
    which = np.asarray([id(each.recorded) for each in planned])
    lengths = np.asarray([len(each.recorded.code) for each in planned])
    ends = np.cumsum(lengths)
    counted = np.asarray([(each.rounds, each.local) for each in planned])
    made = []
    for key, recorded in known.items():
        those = which == key
        made.append(Used(recorded, (ends - lengths)[those], *counted[those].T))
    return made, int(ends[-1])


def blocks_of(engine: Fusible, algorithm: Any, fed: Federation, state: Any) -> Blocks:
    """What runs a method in blocks. The program of an earlier run of the same method is used again."""
    shapes = tuple((leaf.shape, leaf.dtype) for leaf in map(jnp.asarray, jax.tree.leaves(state)))
    key = algorithm, fed.rules, shapes
    if not is_settings(type(algorithm)) or not _is_hashable(key):  # another object may have changed since
        return Blocks(engine, algorithm, fed, state)
    if key not in engine.programs:
        engine.programs[key] = Blocks(engine, algorithm, fed, state)
    known: Blocks = engine.programs[key]
    known.begin(fed)
    return known


class Blocks:
    """Runs outer iterations of a method in blocks.

    The numbers of the method that `names` has are values of the program, and the others are part of it. Values
    are in the program's state, where no iteration changes them. If step sizes follow a schedule, the number of the
    iteration is in that state too.
    """

    def __init__(
        self, engine: Any, algorithm: Any, fed: Federation, state: Any, names: Sequence[str] = ()
    ) -> None:
        self._algorithm, self._fed, self._engine, self.names = algorithm, fed, engine, tuple(names)
        leaves, tree = jax.tree.flatten(state)
        self._tree: Any = tree
        self._leaves = [jnp.asarray(leaf) for leaf in leaves]
        self._forms = [Form(leaf.shape, leaf.dtype) for leaf in self._leaves]
        self._own = [numbers_of(algorithm)[name] for name in names]
        self._count, problem = engine.clients.count, engine.problem
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(engine.data))
        # The random numbers of a loss are long straight code, over which LLVM takes minutes in a single function.
        small = size < SMALL and problem.chances is None if engine.single is None else engine.single
        rule = traced_rule(fed.rule)
        if fed.rule is not None and rule is None:
            raise unfit(f"the rule {type(fed.rule).__name__} needs the host")
        self._decay = decay_of(algorithm)
        held = [*self._forms, *(Form((), np.dtype(np.float32)) for _ in (*names, *self.clock(0)))]
        self.program = Program(problem, engine.over, held, small=small, rule=rule)
        self._root: Any = None  # what is known of iterations: a Recorded, a Fork, or nothing
        sizes = [engine.clients.size(client) for client in range(self._count)]
        capacity = engine.clients.capacity
        self._rows = {
            part: Rows(np.asarray([getattr(s, part) for s in sizes]), getattr(capacity, part))
            for part in ("lower", "upper")
        }
        self._weights = fed.weights(range(self._count))
        self._still: dict[str, Any] = {}
        self._most: Counter[Any] = Counter()  # the largest numbers of an iteration: instructions, cohorts, draws
        self._apart = 0  # so many iterations are to be done round by round
        self._given: Given | None = None
        self._held: dict[int, dict[str, int]] = {}
        self._memories: dict[int, tuple[list[Any], Any]] = {}
        self._stride = 1  # the rounds of an iteration, as a guess
        self._keys: dict[tuple[int, str, int], Any] = {}
        self._rekeyed: dict[int, rng.Rekeyed] = {}

    def begin(self, fed: Federation) -> None:
        """Begin a run of the same method on another federation with the same rules."""
        self._fed, self._apart = fed, 0

    def rounds_ahead(self, count: int) -> Iterable[int]:
        """The rounds of each of the next iterations."""
        rounds, local = self._fed.ledger.rounds, self._fed.ledger.local
        for _ in range(count):
            recorded = self._recorded(rounds, local)
            yield recorded.rounds
            rounds, local = rounds + recorded.rounds, local + recorded.local

    def clock(self, iteration: int) -> tuple[Any, ...]:
        """The number of an iteration as a value of the program, if step sizes follow a schedule."""
        return (np.float32(iteration),) if self._decay else ()

    def advance(self, state: Any, begun: int, iterations: int, left: int | None = None) -> Done | None:
        """Do outer iterations after `begun` of them; None if the next one has to be done round by round.

        `left` are left of the run.

        That is so after a block in which a reply was not finite: who is to blame, and what is to be done, is
        decided round by round. It is also so while a client is excluded or close to it, or has not replied since.
        """
        ledger = self._fed.ledger
        if self._apart == 0 and not (ledger.conduct.strikes or ledger.conduct.until or ledger.silent):
            if self._given is None:  # the choices of the next iterations are made known to the first program
                self.plan(AHEAD if left is None else min(AHEAD, left))
            done = self._together(state, begun, iterations)
            if done is not None:
                return done
        self._apart = max(0, self._apart - 1)
        return None

    def _together(self, state: Any, begun: int, iterations: int) -> Done | None:
        ledger = self._fed.ledger
        planned = self.plan(iterations)
        start = time.perf_counter()
        books = Books()
        leaves: Any = tuple(jnp.asarray(leaf) for leaf in (*jax.tree.leaves(state), *self.clock(begun)))
        sound, outcome = [], None
        size = self.part(len(planned), LONGEST, DRAWS)
        try:
            for first in range(0, len(planned), size):
                block = self.block(planned[first : first + size], size, books)
                outcome = self.program.run(self.given(), leaves, block)
                leaves = outcome.state
                sound.append(outcome.sound)
            well = all(map(bool, sound))
        except FedBilevelError:
            raise
        except Exception as error:
            raise StepError(f"rounds {ledger.rounds} and following: {type(error).__name__}: {error}") from error
        assert outcome is not None
        if not well:
            self._apart = len(planned)
            return None
        books.book(ledger, len(planned), time.perf_counter() - start)
        names = planned[-1].recorded.tape.notes
        self._fed.note(**{name: outcome.notes[name] for name in names})
        count = len(self._forms)
        new, before = (self.state_of(part[:count]) for part in (outcome.state, outcome.before))
        return Done(new, before, len(planned))

    def plan(self, iterations: int) -> list[Planned]:
        """The next iterations, each with what it needs."""
        rounds, local = self._fed.ledger.rounds, self._fed.ledger.local
        start = 0 if self._fed.iteration is None else self._fed.iteration()
        planned = []
        for turn in range(iterations):
            recorded = self._recorded(rounds, local)
            planned.append(Planned(recorded, rounds, local, start + turn))
            rounds, local = rounds + recorded.rounds, local + recorded.local
        return planned

    def _recorded(self, rounds: int, local: int) -> Recorded:
        """The iteration that begins after these rounds. The choices of the server say which it is."""
        node, generators = self._root, dict[int, np.random.Generator]()
        while isinstance(node, Fork):
            choice = node.choice
            if choice.number not in generators:
                generators[choice.number] = self._generator(choice, rounds)
            node = node.ways.get(_key(choice.made(generators[choice.number])))
        return self._record(rounds, local) if node is None else node

    def _generator(self, choice: Choice, rounds: int) -> np.random.Generator:
        """The generator of a choice, as `Federation.rng` makes it. Keys are made for many iterations at once."""
        seed, place = self._fed.seed, rounds + choice.after
        if not isinstance(seed, int):
            return rng.generator(seed, choice.name, place)
        where = seed, choice.name, place
        if where not in self._keys:
            places = place + self._stride * np.arange(AHEAD)
            keys = rng.keys(seed, choice.name, places).tolist()
            self._keys = {(seed, choice.name, int(at)): tuple(key) for at, key in zip(places, keys, strict=True)}
        if choice.number not in self._rekeyed:
            self._rekeyed[choice.number] = rng.Rekeyed()
        self._rekeyed[choice.number].turn(self._keys[where])
        return self._rekeyed[choice.number].generator

    def _record(self, rounds: int, local: int) -> Recorded:
        """Trace an iteration, and remember it by the choices that it makes."""
        watch = Watch(rounds, local)
        opaque = Opaque(self._engine, watch, self._remembered)
        fed = self._fed.elsewhere(opaque, lambda call: Taken(opaque), ledger_at(rounds, local))
        traced, notes = self._traced(Watched(fed, watch), watch)
        tape = make_tape(traced, watch.nodes, notes)
        code = self.program.add(tape)
        if self.program.branches > PIECES:
            raise unfit(
                "its rounds differ in so many ways, perhaps in values that the server draws, that a program would "
                f"have over {PIECES} pieces"
            )
        found = {i.cohort: None for i in tape.instructions if i.cohort is not None}
        cohorts = tuple(found)
        own = self._clients_of(cohorts, rounds)
        made = entries(fed.ledger, watch.bills, own)
        recorded = Recorded(
            tape,
            code,
            made,
            tuple(watch.bills),
            fed.ledger.rounds - rounds,
            fed.ledger.local - local,
            cohorts,
            tuple((at + 1, i.cohort) for at, i in enumerate(tape.instructions) if i.cohort is not None),
            *self._samples(tape),
        )
        self._stride = max(recorded.rounds, 1)
        self._measure(recorded)
        self._insert(watch.choices, recorded)
        return recorded

    def _remembered(self, x: Any, count: int) -> tuple[list[Any], Any]:
        """The leaves, as shapes, and the structure of what this many clients remember of x."""
        if count not in self._memories:
            one = jax.tree.map(lambda a: jax.ShapeDtypeStruct((count, *a.shape[1:]), a.dtype), self._engine.data)
            each = jax.vmap(self._fed.engine.problem.remember, in_axes=(None, 0))
            self._memories[count] = jax.tree.flatten(jax.eval_shape(each, x, one))
        return self._memories[count]

    def _traced(self, fed: Watched, watch: Watch) -> tuple[Any, tuple[str, ...]]:
        noted: list[str] = []

        def step(*values: Any) -> Any:
            leaves, own = values[: len(self._forms)], values[len(self._forms) :]
            own, clock = own[: len(self.names)], own[len(self.names) :]
            method = with_numbers(self._algorithm, dict(zip(self.names, own, strict=True)))
            for iteration in clock:
                method = scheduled(method, iteration, self._decay)
            new, tree = jax.tree.flatten(method.step(fed, jax.tree.unflatten(self._tree, leaves)))
            new = [jnp.asarray(leaf) for leaf in new]
            if tree != self._tree or [Form(a.shape, a.dtype) for a in new] != self._forms:
                raise unfit("its state changes its structure or its shapes in an iteration")
            noted.extend(fed.noted)
            return *new, *own, *(at + 1 for at in clock), *(jnp.asarray(note) for note in fed.noted.values())

        try:
            traced = jax.make_jaxpr(step)(*self._leaves, *self._own, *self.clock(0))
        except (jax.errors.ConcretizationTypeError, jax.errors.TracerArrayConversionError) as error:
            first = str(error).splitlines()[0]
            raise unfit(f"it looks at values within an iteration ({first})") from None
        watch.check()
        return traced, tuple(noted)

    def _samples(self, tape: Tape) -> tuple[dict[str, np.ndarray], dict[str, dict[str, Sampled]]]:
        """What the rounds of a tape draw, by the group of rounds that draw alike."""
        rounds: dict[str, list[tuple[int, Round]]] = {}
        for at, instruction in enumerate(tape.instructions):
            node = instruction.piece.node
            if isinstance(node, Round) and (group := group_of(node)) is not None:
                rounds.setdefault(group, []).append((at + 1, node))
        sampled: dict[str, dict[str, Sampled]] = {}
        for group, members in rounds.items():
            for name, descriptor in members[0][1].call.samples.items():
                if self._keep_still(descriptor):
                    places = np.asarray([node.places[name] for _, node in members])
                    kind, cohorts = members[0][1].call.kind, tuple(node.cohort for _, node in members)
                    sampled.setdefault(group, {})[name] = Sampled(descriptor, kind, places, cohorts)
        grouped = {group: np.asarray([at for at, _ in members]) for group, members in rounds.items()}
        return {group: grouped[group] for group in sampled}, sampled

    def _keep_still(self, descriptor: Descriptor) -> bool:
        """Keep the still part of a descriptor's draws for all clients; return whether there is another part."""
        chances = self._engine.problem.chances
        moves = descriptor.size is not None or chances is not None
        key = descriptor_key(descriptor)
        if key not in self._still:
            rows, somewhere = self._rows[descriptor.part], Address(0, Kind.ROUND, 0)
            drawn = [
                draw(descriptor, somewhere, "", client, int(rows.sizes[client]), rows.capacity, chances)
                for client in range(self._count)
            ]
            self._still[key] = jax.tree.map(lambda *a: np.stack(a), *map(still_part, drawn))
            self._most["bytes", key] = sum(a.nbytes for a in jax.tree.leaves(moving_part(drawn[0])))
            self._given = None
        return moves

    def given(self) -> Given:
        if self._given is None:
            still = jax.tree.map(Alike.instead, self._still)
            self._given = Given(self._engine.data, jnp.asarray(self._weights), still)
        return self._given

    def _measure(self, recorded: Recorded) -> None:
        """Note what the longest iteration of each kind needs, so that the arrays of a block have fixed sizes."""
        needs: Counter[Any] = Counter({"code": len(recorded.code)})
        needs.update(("cohort", cohort.size) for cohort in recorded.cohorts)
        needs.update({("group", group): len(rows) for group, rows in recorded.grouped.items()})
        for what, count in needs.items():
            self._most[what] = max(self._most[what], count)

    def part(self, iterations: int, longest: int, limit: int) -> int:
        """How many iterations a part of a block has: a power of four that fits the limits.

        longest   at most about so many iterations
        limit     at most so many bytes of drawn rows
        """
        each = 0
        for recorded in self.known():
            own = 0
            for arguments in recorded.sampled.values():
                for sampled in arguments.values():
                    clients = sum(self._count if c is None else c.size for c in sampled.cohorts)
                    own += clients * self._most["bytes", descriptor_key(sampled.descriptor)]
            each = max(each, own)
        size = 1
        while size < min(iterations, longest) and 4 * size * each <= limit:
            size *= 4
        return size

    @property
    def begun(self) -> bool:
        """Whether a program was run, for which choices had to be made known."""
        return self._given is not None

    def state_of(self, leaves: Sequence[Any]) -> Any:
        """The state that has these leaves."""
        return jax.tree.unflatten(self._tree, leaves)

    def known(self) -> list[Recorded]:
        """The iterations that were traced."""
        return _iterations(self._root)

    def bytes_of_a_run(self) -> int:
        """About how many bytes a run needs: its registers, and all values of the largest piece."""
        block = self.block(self.plan(1), 1, Books())
        state = (*self._leaves, *map(np.float32, self._own), *self.clock(0))
        return self.program.bytes_of_a_run(self.given(), state, block)

    def block(self, planned: Sequence[Planned], size: int, books: Books) -> Block:
        """The instructions of some iterations, and everything that is drawn for them."""
        used, length = _used(planned)
        code = np.zeros((size * self._most["code"], self.program.longest), np.int32)
        for each in used:
            own = each.recorded.code
            code[each.rows(np.arange(len(own))), : own.shape[1]] = np.tile(own, (len(each.at), 1))
        cohorts: dict[int, list[np.ndarray]] = {}
        everyone, at = np.arange(self._count), 0
        for recorded, rounds, _, iteration in planned:
            clients: dict[Cohort | None, Any] = {None: everyone}
            for cohort in recorded.cohorts:
                clients[cohort] = np.sort(self._drawn(cohort, recorded.cohorts, rounds, iteration))
                alike = cohorts.setdefault(cohort.size, [])
                code[[at + row for row, its in recorded.cohorted if its == cohort], COHORT] = len(alike)
                alike.append(clients[cohort])
            books.add(recorded.entries, self._holding(recorded, clients), recorded.local)
            at += len(recorded.code)
        stacks = {count: np.stack(alike).astype(np.int32) for count, alike in cohorts.items()}
        moving = self._moving(used, code, stacks, size)
        grown = {count: _grown(stack, size * self._most["cohort", count]) for count, stack in stacks.items()}
        return Block(np.int32(length), code, grown, moving)

    def _moving(
        self, used: Sequence[Used], code: np.ndarray, stacks: dict[int, np.ndarray], size: int
    ) -> dict[str, dict[str, Any]]:
        """What is drawn for the calls of a block, by group. Their places in it are written into the code."""
        made: dict[str, dict[str, Any]] = {}
        for group in dict.fromkeys(group for each in used for group in each.recorded.grouped):
            own = [each for each in used if group in each.recorded.grouped]
            rows = np.concatenate([each.rows(each.recorded.grouped[group]) for each in own])
            order = np.argsort(rows)  # what is drawn stands in the order of the calls
            rows = rows[order]
            code[rows, PLACE] = np.arange(len(rows))
            for name, (descriptor, kind, _, cohorts) in own[0].recorded.sampled[group].items():
                starts = np.concatenate([each.starts(each.recorded.sampled[group][name]) for each in own])[order]
                if cohorts[0] is None:
                    who = np.broadcast_to(np.arange(self._count), (len(rows), self._count))
                else:
                    who = stacks[cohorts[0].size][code[rows, COHORT]]
                calls, known = Calls(self._fed.seed, kind, starts, who), self._rows[descriptor.part]
                chances, number = self._engine.problem.chances, smallest_type(known.capacity)
                drawn = draw_ahead(descriptor, name, calls, known, chances, number)
                most = size * self._most["group", group]
                made.setdefault(group, {})[name] = jax.tree.map(lambda a, to=most: _grown(a, to), drawn)
        return made

    def _holding(self, recorded: Recorded, own: dict[Cohort | None, Any]) -> dict[str, int]:
        """The bytes of held vectors. Where everyone takes part they are the same in every iteration."""
        if recorded.cohorts:
            return holding(recorded.bills, {cohort: frozenset(ids.tolist()) for cohort, ids in own.items()})
        if id(recorded) not in self._held:
            self._held[id(recorded)] = holding(recorded.bills, {None: frozenset(range(self._count))})
        return self._held[id(recorded)]

    def _clients_of(self, cohorts: Sequence[Cohort], rounds: int) -> dict[Cohort | None, frozenset[int]]:
        """The clients of the cohorts of an iteration."""
        made: dict[Cohort | None, frozenset[int]] = {None: frozenset(range(self._count))}
        for cohort in cohorts:
            now = 0 if self._fed.iteration is None else self._fed.iteration()
            made[cohort] = frozenset(self._drawn(cohort, cohorts, rounds, now).tolist())
        return made

    def _drawn(self, cohort: Cohort, cohorts: Sequence[Cohort], rounds: int, iteration: int) -> np.ndarray:
        """The clients of one of the cohorts of an iteration, as `Federation.cohort` draws them."""
        place: tuple[int, ...] = (rounds + cohort.after,)
        if self._fed.iteration is not None:
            place = iteration, sorted({each.after for each in cohorts}).index(cohort.after)
        return drawn_clients(self._fed.seed, place, self._count, cohort.size)

    def _insert(self, choices: Sequence[tuple[Choice, Any]], recorded: Recorded) -> None:
        if not choices:
            self._root = recorded
            return
        if self._root is None:
            self._root = Fork(choices[0][0], {})
        node = self._root
        for (_, result), following in zip(choices, [*choices[1:], None], strict=True):
            if following is None:
                node.ways[_key(result)] = recorded
            else:
                node = node.ways.setdefault(_key(result), Fork(following[0], {}))


def _iterations(node: Any) -> list[Recorded]:
    if isinstance(node, Fork):
        return [each for way in node.ways.values() for each in _iterations(way)]
    return [] if node is None else [node]


def _key(result: Any) -> Any:
    """The result of a choice, as the key of a way."""
    if isinstance(result, int | np.integer):
        return int(result)
    array = np.asarray(result)
    return array.shape, array.dtype.str, array.tobytes()


def _grown(array: np.ndarray, to: int) -> np.ndarray:
    """The array with rows of zeros behind it."""
    if len(array) == to:
        return array
    made = np.zeros((to, *array.shape[1:]), array.dtype)
    made[: len(array)] = array
    return made


def _is_hashable(key: Any) -> bool:
    """Whether a key can be looked up. That of a method whose settings have a table, as an optimiser's, cannot."""
    try:
        hash(key)
    except TypeError:
        return False
    return True
