"""The work of one client for one call, which all engines share: draw, pad, recall, perform."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from ..data import ClientData, ClientSize, Part
from ..oracle import Arrays, Kept, PartArrays
from ..problem import BilevelProblem
from ..rng import Kind
from ..steps import draw
from ._call import Call
from ._expected import expect
from ._statefile import State
from ._states import ClientStates


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
    sent = reply._replace(**dict.fromkeys(call.step.kept))
    return sent, {name: tuple(jax.tree.leaves(value)) for name, value in own.items()} if call.keeps else {}


def recalled(call: Call, problem: BilevelProblem, states: ClientStates, client: int) -> dict[str, Kept]:
    """The client's own arrays that the step needs: those it has kept, or else zeros marked as not kept."""
    asked = expect(call, problem).asked
    if not asked:
        return {}
    state = states.read(client, call.clock)
    return {
        name: Kept(np.bool_(True), state[name])
        if name in state
        else Kept(np.bool_(False), tuple(np.zeros(s.shape, s.dtype) for s in structs))
        for name, structs in asked.items()
    }


def pad(data: ClientData, capacity: ClientSize) -> Arrays:
    """Pad both parts to the capacity with copies of their first row, which get weight zero."""

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

    return Arrays(fill(data.lower, capacity.lower), fill(data.upper, capacity.upper))
