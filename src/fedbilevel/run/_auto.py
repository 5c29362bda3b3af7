"""The engine that `federation.engine = "auto"` stands for.

The choice is between one program for many rounds (`fused`) and one for each step (`simulation`). It is made by
the arithmetic of a round, which is counted and not timed. Two machines therefore choose alike, a run that is
resumed goes on with the engine that it began with, and the numbers of a run do not depend on what else its machine
had to do.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from ..algorithms import Algorithm
from ..data import Clients
from ..engines import AutoSettings, Call, Engine, FusedSettings, SimulationSettings, pad
from ..errors import SettingsError
from ..federation import Federation
from ..problem import BilevelProblem
from ..spec import FederationSettings
from ..steps import Draw, PartName, steps_of
from ._rehearsal import rehearsed_calls

# A round of the simulation costs the host from half a millisecond to a few. `fused` saves that, but computes on
# one device only. Up to about this many operations a round, it was measured to be faster (docs/engines.md).
MOST = 2e7


class EngineChoice(NamedTuple):
    """Which engine was chosen, why, and the floating-point operations of a round, if they were counted."""

    name: str
    why: str
    operations: float | None = None

    def to_mapping(self) -> dict[str, Any]:
        counted = {} if self.operations is None else {"operations_a_round": self.operations}
        return {"name": self.name, **counted, "why": self.why}

    def __str__(self) -> str:
        return f"engine: {self.name}; {self.why}"


def choose_engine(
    rules: FederationSettings,
    problem: BilevelProblem,
    clients: Clients,
    algorithm: Algorithm,
    check: Callable[[], None],
) -> tuple[Engine, EngineChoice]:
    """Choose the engine of a run and build it. `check` raises if a setting of the run rules out `fused`."""
    if rules.must_loop(problem):
        why = "JAX cannot trace the oracle of this problem"
        return rules.build(problem, clients), EngineChoice("loop", why)
    settings: AutoSettings = rules.engine

    def built(kind: type[SimulationSettings] | type[FusedSettings]) -> Engine:
        made = kind(over=settings.over, memory_limit=settings.memory_limit)
        return dataclasses.replace(rules, engine=made).build(problem, clients)

    try:
        check()
        fused = built(FusedSettings)
    except SettingsError as error:
        return built(SimulationSettings), EngineChoice("simulation", f"fused is not possible: {error}")
    operations = operations_of_a_round(fused, algorithm)
    small = operations <= MOST
    why = f"a round has {operations:.1e} operations, {'at most' if small else 'more than'} {MOST:.0e}"
    if small:
        return fused, EngineChoice("fused", why, operations)
    fused.close()
    return built(SimulationSettings), EngineChoice("simulation", why, operations)


def operations_of_a_round(engine: Engine, algorithm: Algorithm) -> float:
    """The floating-point operations of the clients in a round, on average over the rounds of an outer iteration.

    An iteration is rehearsed to know which rows its clients draw. A row of a draw counts as one gradient, of the
    lower loss by y or of the upper loss by x, and a new x as one pass over all rows. Steps that take several
    derivatives of a draw have a few times as many operations. If a method cannot be rehearsed, a round is one pass
    over all rows.
    """
    problem, clients = engine.problem, engine.clients
    state = algorithm.init(problem, clients.count)
    calls = rehearsed_calls(algorithm, Federation(engine), state)
    lower, upper, memory = _operations(problem, clients)
    each = {"lower": lower / clients.capacity.lower, "upper": upper / clients.capacity.upper}
    if not calls:
        return clients.count * (lower + upper)
    drawn = sum(each[part] * rows for call in calls for part, rows in _rows(call, clients))
    return (drawn + memory * len(calls[0].clients)) / len(calls)


def _operations(problem: BilevelProblem, clients: Clients) -> tuple[float, float, float]:
    """The operations of a client's gradients, by y and by x, on all rows, and of what it remembers of a new x."""
    data = jax.tree.map(np.asarray, pad(clients.load(0), clients.capacity))
    x, y, all_rows = problem.flat_x.vector, problem.flat_y.vector, Draw(None, None)
    memory = jax.eval_shape(problem.remember, x, data)

    def counted(function: Callable[..., Any], *arguments: Any) -> float:
        costs = jax.jit(function).lower(*arguments).cost_analysis() or {}
        return float(costs.get("flops", 0.0))

    def by(derivative: str) -> float:
        def gradient(x: Any, y: Any, data: Any, memory: Any) -> Any:
            return getattr(problem.oracle({"x": x, "y": y}, data, memory, {}), derivative)(y, all_rows)

        return counted(gradient, x, y, data, memory)

    return by("g_y"), by("f_x"), counted(problem.remember, x, data)


def _rows(call: Call, clients: Clients) -> list[tuple[PartName, int]]:
    """How many rows the clients of a call draw, by part."""
    found: list[tuple[PartName, int]] = []
    for descriptor in call.samples.values():
        capacity = getattr(clients.capacity, descriptor.part)
        for client in call.clients:
            rows = getattr(clients.size(client), descriptor.part)
            steps, _ = steps_of(descriptor, client, rows, capacity)
            found.append((descriptor.part, steps * min(descriptor.size or rows, rows)))
    return found
