"""The work of one client for one call, which all engines share: draw, pad, recall, perform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..data import ClientData, Clients, ClientSize, Part, test_rows
from ..errors import SettingsError, StepError
from ..oracle import Arrays, Kept, PartArrays
from ..own import KEPT, own_part
from ..problem import Batchable, BilevelProblem, Native
from ..rng import Kind
from ..steps import Form, draw
from ._call import Call
from ._expected import expect
from ._statefile import State
from ._states import ClientStates


def need_traceable(problem: BilevelProblem, engine: str) -> None:
    """Raise if JAX cannot trace the problem's oracle, which this engine has to."""
    if not problem.traceable:
        raise SettingsError(
            f"federation.engine = {engine!r} is wrong for this problem: JAX cannot trace its oracle; use 'loop'"
            + (", or 'batched', or convert = True of TorchProblem" if isinstance(problem, Batchable) else "")
        )


def native(problem: BilevelProblem, values: Any) -> Any:
    """What a step that is not traced is given: NumPy arrays, or those of the problem's own library."""
    arrays = jax.tree.map(np.asarray, values)
    return problem.to_native(arrays) if isinstance(problem, Native) else arrays


def perform_untraced(problem: BilevelProblem, call: Call, *arguments: Any) -> tuple[Any, State]:
    """`perform` without tracing, from NumPy arrays to NumPy arrays. The draws and the data stay as they are."""
    vectors, arrays, rows, draws, kept, data, memory = arguments
    vectors, arrays, rows, kept = native(problem, (vectors, arrays, rows, kept))
    made = perform(problem, call, vectors, arrays, rows, draws, kept, data, memory)
    return problem.from_native(made) if isinstance(problem, Native) else made


def prepare(
    call: Call, problem: BilevelProblem, client: int, size: ClientSize, capacity: ClientSize
) -> dict[str, Any]:
    """Draw the rows of a call for one client, at the address of the call, the argument and the client.

    In a measurement the losses are not random.
    """
    lower, upper = size
    chances = None if call.kind is Kind.PROBE else problem.chances
    rows = {"lower": (lower, capacity.lower), "upper": (upper, capacity.upper)}
    return {
        name: draw(descriptor, call.address, name, client, *rows[descriptor.part], chances)
        for name, descriptor in call.samples.items()
    }


def perform(
    problem: BilevelProblem,
    call: Call,
    vectors: Mapping[str, Any],
    arrays: Mapping[str, Any],
    rows: Mapping[str, Any],
    draws: Mapping[str, Any],
    kept: Mapping[str, Kept],
    data: Arrays,
    memory: Any,
) -> tuple[Any, State]:
    """Run a step for one client; return what it sends and what it keeps. Engines compile and batch this."""
    oracle = problem.oracle(vectors, data, memory, kept)
    reply = call.step(oracle, **arrays, **call.constants, **rows, **draws)
    own = {name: value for name in call.step.kept if (value := getattr(reply, name)) is not None}
    sent, variables = reply._replace(**dict.fromkeys(call.step.kept)), own_part(problem)

    def stored(name: str, value: Any) -> tuple[str, tuple[Any, ...]]:
        if variables is not None and call.step.reply[name].form is Form.W:
            return KEPT, variables.kept(value, data.padded, jnp.stack([data.lower.rows, data.upper.rows]))
        return name, tuple(jax.tree.leaves(value))

    return sent, dict(stored(*each) for each in own.items()) if call.keeps else {}


def recalls(call: Call, problem: BilevelProblem) -> bool:
    """Whether the step needs something that clients have kept. All losses depend on a client's own variables."""
    return own_part(problem) is not None or bool(expect(call, problem).asked)


def recalled(
    call: Call, problem: BilevelProblem, states: ClientStates, client: int, capacity: ClientSize
) -> dict[str, Kept]:
    """The client's own arrays that the step needs: those it has kept, or else zeros marked as not kept.

    Own variables that the client has not moved yet have their initial values.
    """
    if not recalls(call, problem):
        return {}
    asked, variables = expect(call, problem).asked, own_part(problem)
    state, own = states.read(client, call.clock), dict[str, Kept]()
    if variables is not None:
        kept = state.get(KEPT) or variables.kept(variables.start(capacity), capacity, np.zeros(2, np.int32))
        count, wanted = sum(leaf.size for leaf in kept[:-1]), variables.size(capacity)
        if count != wanted:
            raise StepError(
                f"client {client} has kept {count:,} own variables, and its rows now need {wanted:,}; "
                "go on with the data that the run began with"
            )
        own[KEPT] = Kept(np.bool_(True), kept)
    return own | {
        name: Kept(np.bool_(True), state[name])
        if name in state
        else Kept(np.bool_(False), tuple(np.zeros(s.shape, s.dtype) for s in structs))
        for name, structs in asked.items()
    }


def load_padded(clients: Clients, client: int, rows: ClientSize | None = None) -> Arrays:
    """The data of a client, padded to so many rows (default: the capacity of all clients)."""
    return pad(clients.load(client), rows or clients.capacity, test_rows(clients))


def load_unpadded(clients: Clients, client: int) -> Arrays:
    """The data of a client with its own numbers of rows, for a step that is not traced."""
    data = clients.load(client)
    size = ClientSize(data.lower.rows, data.upper.rows)
    return pad(data, size, 0 if data.test is None else data.test.rows)


def pad(data: ClientData, capacity: ClientSize, tested: int = 0) -> Arrays:
    """Pad all parts to the capacity with copies of their first row, which get weight zero.

    Test rows are padded to the number `tested`. With zero they are left out.
    """

    def fill(part: Part, rows: int) -> PartArrays:
        count = part.rows

        def grow(a: Any) -> Any:
            a = np.asarray(a)
            if count == rows:
                return a
            out = np.empty((rows, *a.shape[1:]), a.dtype)
            out[:count], out[count:] = a, a[:1]
            return out

        inputs, targets = jax.tree.map(grow, tuple(part))
        return PartArrays(inputs, targets, np.int32(count))

    test = None if data.test is None or tested == 0 else fill(data.test, tested)
    return Arrays(fill(data.lower, capacity.lower), fill(data.upper, capacity.upper), test)
