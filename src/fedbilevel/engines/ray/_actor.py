"""An actor: a process that lives long, with a simulation of whichever clients it is asked for.

For a problem that JAX cannot trace it has a `Loop` in place of the simulation.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from ...rng import Address
from ...runtime import cache_programs, keep_memory
from ...steps import Descriptor, find_step
from .._call import Call, Held
from .._statefile import State
from ..loop import Loop
from ..simulation import Simulation
from ._extra import ray


class Part(NamedTuple):
    """The request to an actor: a call on its part of the cohort, without the arrays.

    `clients` is filled up to the common size; the first `asked` of them are really asked.
    """

    step: str
    address: Address
    clients: tuple[int, ...]
    asked: int
    versions: tuple[tuple[str, int], ...]
    constants: Mapping[str, Any]
    samples: Mapping[str, Descriptor]
    states: Mapping[int, State]


class Answer(NamedTuple):
    """What an actor returns: the fields of the replies, and what each client keeps."""

    fields: dict[str, Any]
    kept: dict[int, State]


class Worker:
    """An actor: a simulation of any clients that it is asked for."""

    def __init__(self, settings: Mapping[str, Any], cpu_devices: int) -> None:
        jax.config.update("jax_num_cpu_devices", cpu_devices)
        keep_memory()
        cache_programs()
        self._settings = settings
        self._simulation: Simulation | Loop | None = None

    def reply(self, task: list[Any], part: Part, down: tuple[Any, Any], *held: Any) -> Answer:
        """Like `answer`. The task comes with every call because a replaced actor has to read it again."""
        return answer(self._prepared(task), part, down, held)

    def prepare(self, task: list[Any]) -> None:
        """Build the simulation before the first round, so that errors appear early."""
        self._prepared(task)

    def _prepared(self, task: list[Any]) -> Simulation | Loop:
        if self._simulation is None:
            problem, clients = ray.get(task[0])
            if problem.traceable:
                self._simulation = Simulation(problem, clients, **self._settings)
            else:
                self._simulation = Loop(problem, clients)
        return self._simulation

    def whereabouts(self) -> tuple[str, int]:
        """The node and the process."""
        return str(ray.get_runtime_context().get_node_id()), os.getpid()


def answer(simulation: Simulation | Loop, part: Part, down: tuple[Any, Any], held: tuple[Any, ...]) -> Answer:
    """The stacked replies of the clients really asked, by field, and what these clients keep."""
    arrays, rows = down
    importlib.import_module(part.step.partition(":")[0])
    shelf = {name: Held(version, value, ()) for (name, version), value in zip(part.versions, held, strict=True)}
    states = simulation.capabilities.states
    assert states is not None
    states.clear()
    for client, state in part.states.items():
        states.write(client, 0, state, 0)
    call = Call(
        step=find_step(part.step),
        address=part.address,
        clients=part.clients if simulation.problem.traceable else part.clients[: part.asked],
        held=shelf,
        arrays=arrays,
        constants=part.constants,
        rows=rows,
        samples=part.samples,
        clock=1,
    )
    chunks = [replies.reply._asdict() for replies in simulation.replies(call)]
    fields = {
        name: None if value is None else np.concatenate([np.asarray(c[name]) for c in chunks])[: part.asked]
        for name, value in chunks[0].items()
    }
    kept = {client: states.read(client, 2) for client in part.clients[: part.asked]} if call.keeps else {}
    return Answer(fields, kept)
