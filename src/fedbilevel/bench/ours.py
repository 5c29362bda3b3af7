"""Our outer iteration, and how its time divides into parts."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._probes import losses
from ..data import Part
from ..engines import Call, Simulation
from ..federation import Federation
from ..problem import task_with_test
from ..steps import Sample
from .cases import CLASSES, Case

TEST_ROWS = 10_000


def ours(case: Case) -> Callable[[], None]:
    """Return a function that performs one outer iteration in each call."""
    return _start(case, Simulation(case.problem, case.clients()))[0]


def _start(case: Case, engine: Any) -> tuple[Callable[[], None], Federation]:
    algorithm, fed = case.algorithm, Federation(engine)
    state = algorithm.init(engine.problem, engine.clients.count)

    def iteration() -> None:
        nonlocal state
        state = jax.block_until_ready(algorithm.step(fed, state))

    return iteration, fed


class Watched:
    """A simulation that times its parts.

    It waits for the result of each part, so parts that overlap in a run are in sequence here.
    """

    def __init__(self, engine: Simulation) -> None:
        self.engine, self.problem, self.clients = engine, engine.problem, engine.clients
        self.capabilities = engine.capabilities
        self.seconds: defaultdict[str, float] = defaultdict(float)
        names: dict[str, Callable[..., str]] = {
            "embed": lambda *_: "embedding",
            "load": lambda *_: "loading data",
            "draw": lambda *_: "drawing rows",
            "compute": lambda call, *_: call.step.name,
        }
        for method, name in names.items():
            setattr(engine, method, self._timed(name, getattr(engine, method)))

    def replies(self, call: Call) -> Any:
        return self.engine.replies(call)

    def _timed(self, name: Callable[..., str], function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any) -> Any:
            start = time.perf_counter()
            made = jax.block_until_ready(function(*arguments))
            self.seconds[name(*arguments)] += time.perf_counter() - start
            return made

        return timed


def profile(case: Case, expected: float) -> dict[str, float]:
    """Return the seconds of one outer iteration by part, and of an evaluation.

    `expected` is the time of an iteration in seconds; the slower it is, the fewer repeats there are. `dispatch`
    is the remainder: checks and means of replies, the ledger, and Python.
    """
    repeats = int(np.clip(4 / expected, 1, 12))
    engine = Watched(Simulation(case.problem, case.clients()))
    iteration, fed = _start(case, engine)
    for _ in range(min(repeats, 4) * (case.N + 1)):
        iteration()
    engine.seconds.clear()
    start = time.perf_counter()
    for _ in range(repeats):
        iteration()
    total = (time.perf_counter() - start) / repeats
    parts = {name: taken / repeats for name, taken in engine.seconds.items()}
    parts["dispatch"] = total - sum(parts.values())
    parts["evaluation (beside)"] = _evaluation(case, fed, repeats)
    return parts


def _evaluation(case: Case, fed: Federation, repeats: int) -> float:
    """Time what a run evaluates after an iteration: accuracy on 10,000 test rows and the losses of ten clients."""
    rng = np.random.default_rng(1)
    inputs = rng.random((TEST_ROWS, case.inputs), np.float32)
    test = Part(inputs, rng.integers(0, CLASSES, TEST_ROWS).astype(np.int32))
    problem = fed.engine.problem
    task = task_with_test(problem, fed.engine.clients, test)
    x, y = problem.flat_x.vector, problem.flat_y.vector

    def evaluate() -> None:
        measured = task.measure(x, y)
        probe = fed.probe(losses, clients=tuple(range(10)), x=x, y=y, xi=Sample("upper"), zeta=Sample("lower"))
        jax.block_until_ready((measured, probe))

    evaluate()
    start = time.perf_counter()
    for _ in range(repeats):
        evaluate()
    return (time.perf_counter() - start) / repeats
