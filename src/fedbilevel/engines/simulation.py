"""An engine that runs all clients of the cohort in one compiled program for each step.

The cohort is cut into chunks that fit a memory limit. Within a chunk, clients are batched by `vmap` or served one
after the other by `lax.map`, and spread over the devices if there are several. All chunks have the same shape, so
nothing compiles twice. Clients of very unequal size are served in groups of like size (`_groups.py`).

With several processes (`jax.distributed`) the devices of all processes are used. Each process loads data and draws
samples for the clients on its own devices. Replies are gathered, so that every process has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ..data import Clients, ClientSize
from ..errors import FedBilevelError, SettingsError, StepError
from ..oracle import Arrays, Kept
from ..own import own_part
from ..problem import BilevelProblem, Over
from ..rng import Kind
from ..steps import Form
from ._base import Capabilities, Reduce
from ._call import Call
from ._draws import Draws
from ._groups import Group, groups_of, in_order, joined
from ._placed import Placed
from ._replies import Averaged, Replies
from ._states import ClientStates
from ._work import load_padded, need_traceable, perform, recalled, recalls

PyTree = Any
MIB = 2**20
SMALL = 2**20  # clients with less to do, as a number of rows times parameters, work on one device


class Resident(NamedTuple):
    """A chunk's data on the devices, and what its clients computed from one version of x."""

    data: Arrays
    version: int | None
    memory: Any


class Simulation:
    """Runs a cohort as one jitted program for each step.

    over            "vmap" batches the clients of a chunk, "map" serves them in turn inside the program (default:
                    the problem's choice)
    memory_limit    MiB for a cohort's data, its features and a program's work on them; a cohort that needs more is
                    cut into chunks. The clients' states have the same limit, and are moved to files beyond it
    devices         the number of devices to spread clients over (default: all that JAX sees, of all processes; one
                    if the clients have so little to do that devices would mostly wait for each other)
    """

    def __init__(
        self,
        problem: BilevelProblem,
        clients: Clients,
        *,
        over: Over | None = None,
        memory_limit: int = 1024,
        devices: int | None = None,
    ) -> None:
        need_traceable(problem, "simulation")
        self.problem, self.clients = problem, clients
        self._states = ClientStates(limit=memory_limit)
        self.capabilities = Capabilities(states=self._states)
        self._over = over or problem.over
        self._limit = memory_limit * MIB
        available = jax.devices()
        if devices is not None and not 1 <= devices <= len(available):
            raise SettingsError(
                f"devices = {devices} is wrong: JAX sees {len(available)}; use 1 to {len(available)}"
            )
        self._width = self._row_work()
        self._processes = jax.process_count()
        if self._processes > 1 and devices not in (None, len(available)):
            raise SettingsError(
                f"devices = {devices} is wrong: {self._processes} processes have {len(available)} and use all of "
                "them; remove it"
            )
        if devices is None and self._processes == 1 and self._is_small():
            devices = 1
        self._mesh = jax.make_mesh(
            (devices or len(available),), ("clients",), (AxisType.Auto,), devices=available[:devices]
        )
        self._everywhere, self._apart = (
            NamedSharding(self._mesh, PartitionSpec(*axes)) for axes in ((), ("clients",))
        )
        self._programs: dict[Any, Any] = {}
        self._kept: dict[bool, tuple[tuple[int, ...], dict[Any, Resident]]] = {}
        self._grouped: tuple[tuple[int, ...], list[Group]] = (), []
        self._held: dict[str, tuple[int, Array]] = {}
        self._draws = Draws(problem, clients, spread=self._spread, send=self._send)
        self._placed = Placed(self._everywhere)
        self._remember = self._compile(problem.remember)
        self._kept_bytes, self._work_bytes = self._estimate()

    def replies(self, call: Call) -> Iterator[Replies]:
        """Run the step on all clients of the cohort at once, or on as many as fit into memory."""
        for chunk, asked in self._chunks(call.clients):
            with _told(call):
                reply, _ = self._reply(call, chunk, asked)
            yield Replies(clients=asked, reply=reply)

    def average(self, call: Call, weights: np.ndarray, reduce: Reduce) -> Replies | None:
        """All replies of a cohort that is one chunk, with their mean, which is taken in the same program."""
        chunks = list(self._chunks(call.clients))
        if len(chunks) != 1 or self._processes > 1:
            return None
        ((chunk, asked),) = chunks
        with _told(call):
            reply, (sound, means) = self._reply(call, chunk, asked, (reduce, weights))
        if self._mesh.size > 1:
            means = [self._placed.on_one_device(mean) for mean in means]
        mean = Averaged(sound, jax.tree.unflatten(jax.tree.structure(reply), means))
        return Replies(clients=asked, reply=reply, mean=mean)

    def close(self) -> None:
        """Forget data, vectors and states."""
        self._kept.clear()
        self._held.clear()
        self._draws.clear()
        self._placed.clear()
        self._states.clear()

    def load(self, chunk: tuple[int, ...], rows: ClientSize | None = None) -> Arrays:
        """The data of a chunk or of a group of its clients, padded and stacked, on the devices."""
        return self._spread(_stack([load_padded(self.clients, client, rows) for client in self._here(chunk)]))

    def embed(self, x: Array, data: Arrays) -> Any:
        """The values that the chunk's clients compute once from a new x."""
        return self._remember(x, data)

    def draw(self, call: Call, chunk: tuple[int, ...], group: Group | None = None) -> tuple[Any, Any, Any]:
        """The values of clients, the rows of their samples, and their kept states: of a chunk or a group of it."""
        here = self._here(chunk if group is None else group.clients)
        rows = {name: np.asarray(each.values, np.float32)[list(here)] for name, each in call.rows.items()}
        kept: Any = {}
        if recalls(call, self.problem):  # most steps ask for nothing
            capacity = self.clients.capacity
            kept = _stack([recalled(call, self.problem, self._states, client, capacity) for client in here])
        return self._send(rows), self._draws.of(call, self._here(chunk), group), self._send(kept)

    def compute(
        self,
        call: Call,
        rows: Any,
        draws: Any,
        kept: dict[str, Kept],
        data: Arrays,
        memory: Any,
        mean: tuple[Reduce, np.ndarray] | None = None,
    ) -> Any:
        """Run the step's program, and return what clients send and what they keep, and if asked for the mean.

        Without a memory, the program itself embeds the data that it needs.
        """
        reduce, weights = (None, None) if mean is None else mean
        program = (*call.program, memory is None, reduce)
        if program not in self._programs:

            def step(shared: Any, each: Any) -> Any:
                vectors, arrays = shared
                rows, draws, kept, data, memory = each
                if memory is None and "x" in vectors:
                    memory = self.problem.remember(vectors["x"], data)
                return perform(self.problem, call, vectors, arrays, rows, draws, kept, data, memory)

            self._programs[program] = self._compile(step, gather=True, reduce=reduce)
        shared, each = (self._vectors(call), self._share(call.arrays)), (rows, draws, kept, data, memory)
        if weights is None:
            return *self._programs[program](shared, each), None
        return self._programs[program](shared, each, self._weights(weights))

    def _reply(
        self,
        call: Call,
        chunk: tuple[int, ...],
        asked: tuple[int, ...],
        mean: tuple[Reduce, np.ndarray] | None = None,
    ) -> tuple[Any, Any]:
        """What the clients of a chunk send, and their mean if it is asked for."""
        groups = self._groups(call, chunk, asked)
        if groups:
            return self._joined([self._of_group(call, chunk, group) for group in groups], groups, mean)
        if mean is not None and len(asked) < len(chunk):
            mean = mean[0], np.pad(mean[1], (0, len(chunk) - len(asked)))
        resident = self._resident(call, chunk)  # This comes first, so that it embeds while rows are drawn.
        drawn = self.draw(call, chunk)
        reply, own, mean = self.compute(call, *drawn, resident.data, resident.memory, mean)
        if own:
            self._keep(call, asked, own)
        return reply if len(asked) == len(chunk) else _first(reply, len(asked)), mean

    def _of_group(self, call: Call, chunk: tuple[int, ...], group: Group) -> Any:
        """What the clients of a group send."""
        resident = self._resident(call, group.clients, group.rows)
        drawn = self.draw(call, chunk, group)
        reply, own, _ = self.compute(call, *drawn, resident.data, resident.memory)
        if own:
            self._keep(call, group.clients[: len(group.places)], own)
        return reply

    def _groups(self, call: Call, chunk: tuple[int, ...], asked: tuple[int, ...]) -> list[Group]:
        """The groups in which the clients of a chunk are served.

        There are none if the values of a client depend on the number of rows that it is padded to, as those of
        random losses do, own variables, and stacks of as many matrices as there are minibatches.
        """
        whole = self._processes > 1 or self.problem.chances is not None or own_part(self.problem) is not None
        if whole or any(field.form is Form.YY for field in call.step.reply.values()):
            return []
        if self._grouped[0] != asked:
            sizes = self._draws.sizes(chunk)[: len(asked)]
            groups = groups_of(asked, sizes, self.clients.capacity, self._mesh.size, self._width)
            self._grouped = asked, groups
        return self._grouped[1]

    def _joined(
        self, parts: list[Any], groups: list[Group], mean: tuple[Reduce, np.ndarray] | None
    ) -> tuple[Any, Any]:
        """The replies of all groups in the order of the clients, and their mean if it is asked for."""
        reduce, weights = (None, None) if mean is None else mean
        lanes = self._mesh.size
        if ("joined", reduce) not in self._programs:

            def join(parts: list[Any], order: Any, weights: Any) -> Any:
                reply = joined(parts, order, lanes)
                return reply, None if reduce is None else reduce(jax.tree.leaves(reply), weights)

            self._programs["joined", reduce] = jax.jit(join)
        order = self._share(in_order(groups, lanes))
        return self._programs["joined", reduce](parts, order, None if weights is None else self._weights(weights))

    def _keep(self, call: Call, asked: tuple[int, ...], own: Any) -> None:
        """Store what the clients of a chunk keep."""
        host = jax.tree.map(np.asarray, own)
        for i, client in enumerate(asked):
            state = {name: tuple(leaf[i] for leaf in leaves) for name, leaves in host.items()}
            self._states.write(client, call.clock, state, call.settled)

    def _compile(self, function: Any, gather: bool = False, reduce: Reduce | None = None) -> Any:
        """jit function(shared, each) over a leading client axis of `each`, spread over the devices.

        `shared` is on all devices. With `gather`, the result is for the server, so it is copied to every process.
        With `reduce`, the program has the weights of clients as a further argument, and the mean as a result.
        """

        def batched(shared: PyTree, each: PyTree) -> PyTree:
            if self._over == "vmap":
                return jax.vmap(function, in_axes=(None, 0))(shared, each)
            return jax.lax.map(lambda one: function(shared, one), each)

        spread = batched
        if self._mesh.size > 1:
            everywhere, apart = self._everywhere.spec, self._apart.spec
            spread = jax.shard_map(
                batched, mesh=self._mesh, in_specs=(everywhere, apart), out_specs=apart, check_vma=False
            )
        if reduce is not None:
            return jax.jit(lambda shared, each, weights: _with_mean(spread(shared, each), weights, reduce))
        if self._processes == 1:
            return jax.jit(spread)
        program = jax.jit(spread, out_shardings=self._everywhere if gather else self._apart)

        def with_all(shared: PyTree, each: PyTree) -> PyTree:
            out = program(shared, each)
            return jax.tree.map(lambda a: a.addressable_data(0), out) if gather else out

        return with_all

    def _chunks(self, cohort: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Chunks of equal size, each with the clients really asked; the last is filled up with its last client."""
        if self._stays(cohort):
            most = (self._limit - len(cohort) * self._kept_bytes) // self._work_bytes
        else:
            most = max(1, self._limit // (self._kept_bytes + self._work_bytes))
        count = -(-len(cohort) // most)
        size = -(-len(cohort) // count)
        size = -(-size // self._mesh.size) * self._mesh.size
        for start in range(0, len(cohort), size):
            asked = cohort[start : start + size]
            yield asked + asked[-1:] * (size - len(asked)), asked

    def _stays(self, cohort: tuple[int, ...]) -> bool:
        """Whether a cohort's data and memory are kept: half of the limit holds them, and a client's work fits."""
        kept = len(cohort) * self._kept_bytes
        return kept <= self._limit // 2 and kept + self._work_bytes <= self._limit

    def _resident(self, call: Call, chunk: tuple[int, ...], rows: ClientSize | None = None) -> Resident:
        """The data of a chunk or of a group of its clients, and the memory at the held x.

        Both are kept while the cohort stays the same, separately for work and probes, if they fit the limit.
        Otherwise the data are loaded for every round and there is no memory: a program that embeds the data itself
        can skip those that its step does not need.
        """
        if not self._stays(call.clients):
            return Resident(self.load(chunk, rows), None, None)
        measured = call.kind is Kind.PROBE
        if self._kept.get(measured, ((), {}))[0] != call.clients:
            self._kept[measured] = call.clients, {}
        kept = self._kept[measured][1]
        resident = kept.get((chunk, rows)) or Resident(self.load(chunk, rows), None, None)
        held = call.held.get("x")
        if held is not None and resident.version != held.version:
            resident = Resident(resident.data, held.version, self.embed(self._vectors(call)["x"], resident.data))
        kept[chunk, rows] = resident
        return resident if held is not None else Resident(resident.data, None, None)

    def _vectors(self, call: Call) -> dict[str, Array]:
        """The held vectors, on all devices. Each vector is sent there once."""
        for name, held in call.held.items():
            if name not in self._held or self._held[name][0] != held.version:
                self._held[name] = held.version, self._share(held.value)
        return {name: self._held[name][1] for name in call.held}

    def _here(self, chunk: tuple[int, ...]) -> tuple[int, ...]:
        """The clients of a chunk on the devices of this process; all clients if there is only one process."""
        if self._processes == 1:
            return chunk
        indices = self._apart.addressable_devices_indices_map((len(chunk),)).values()
        places = sorted((index[0] for index in indices if index), key=lambda place: place.start)
        return tuple(client for place in places for client in chunk[place])

    def _spread(self, tree: PyTree) -> PyTree:
        """The rows of this process' clients, as parts of arrays over all devices."""
        if self._mesh.size == 1:
            return jax.tree.map(jnp.asarray, tree)
        return self._send(tree)

    def _send(self, tree: PyTree) -> PyTree:
        """Like `_spread`, for what is used once. A single device is sent it with the call of the program."""
        if not tree or self._mesh.size == 1:
            return tree
        if self._processes == 1:
            return jax.device_put(tree, self._apart)
        return jax.tree.map(lambda a: jax.make_array_from_process_local_data(self._apart, a), tree)

    def _share(self, tree: PyTree) -> PyTree:
        """Put values that every process has on all devices, unless they are there."""
        if self._processes > 1:
            return jax.tree.map(self._replicate, tree)
        if self._mesh.size == 1:
            return tree
        return jax.tree.map(self._placed.everywhere, tree)

    def _weights(self, weights: np.ndarray) -> Any:
        """The weights of a chunk's clients, on the devices."""
        return weights if self._mesh.size == 1 else self._placed.everywhere(weights)

    def _replicate(self, value: Any) -> Array:
        copies = [jax.device_put(value, device) for device in self._everywhere.addressable_devices]
        return jax.make_array_from_single_device_arrays(np.shape(value), self._everywhere, copies)

    def _row_work(self) -> int:
        """The work of a row, as the number of parameters and of the numbers of the row."""
        one = jax.tree.leaves(tuple(self.clients.load(0)))
        numbers = sum(np.size(leaf) // max(1, len(leaf)) for leaf in map(np.atleast_1d, map(np.asarray, one)))
        return self.problem.size_x + self.problem.size_y + numbers

    def _is_small(self) -> bool:
        """Whether all clients have little to do: few rows, times the work of a row."""
        return self.clients.count * sum(self.clients.capacity) * self._width < SMALL

    def _estimate(self) -> tuple[int, int]:
        """Estimate the bytes of a client: those that stay between steps, and those that a step takes in addition.

        The former are its data and its memory. The memory counts twice, because the old one is released only after
        the new one is made. The latter follow a rule from measured peaks (docs/scale.md): sixteen vectors, half of
        them blocks that the allocator keeps for the next program, and a copy of the data on their way to the
        devices.
        """
        one = load_padded(self.clients, 0)
        x = self.problem.flat_x.vector
        memory = jax.eval_shape(self.problem.remember, x, one)
        data, memory = (
            sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree)) for tree in (one, memory)
        )
        variables = own_part(self.problem)
        own = 0 if variables is None else variables.size(self.clients.capacity)
        return data + 2 * memory, data + 16 * 4 * (self.problem.size_x + self.problem.size_y + own)


def _with_mean(out: Any, weights: Any, reduce: Reduce) -> Any:
    reply, own = out
    return reply, own, reduce(jax.tree.leaves(reply), weights)


@contextmanager
def _told(call: Call) -> Iterator[None]:
    """Tell in which call an error of JAX or of a step occurred."""
    try:
        yield
    except FedBilevelError:
        raise
    except Exception as error:
        raise StepError(f"{call}: {type(error).__name__}: {error}") from error


def _first(tree: Any, count: int) -> Any:
    return jax.tree.map(lambda a: a[:count], tree)


def _stack(trees: list[Any]) -> Any:
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees)
