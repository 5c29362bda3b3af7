"""Timing of one case.

Our iteration, its floor and the rivals are run in turn, so that other work on the machine affects all of them
alike.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ..runtime import peak_memory
from .cases import Case
from .floor import floor, flop
from .ours import ours

Iteration = Callable[[], object]
LARGEST_RIVAL = 10  # With a larger cohort, an iteration of the rivals takes minutes.


def seconds(iteration: Iteration) -> float:
    start = time.perf_counter()
    iteration()
    return time.perf_counter() - start


def rivals(case: Case) -> dict[str, Iteration]:
    """Return the PyTorch rivals by the name of their column, or none if torch (the extra `bench`) is missing.

    They compute FBO-AggITD, and so there are none for other methods.
    """
    absent = importlib.util.find_spec("torch") is None
    if absent or case.cohort > LARGEST_RIVAL or case.method != "fbo-aggitd":
        return {}
    from .rivals_func import torch_func
    from .rivals_loop import torch_loop

    return {"torch_loop_s": torch_loop(case), "torch_func_s": torch_func(case)}


def measure(case: Case, budget: float = 30.0, least: int = 3) -> dict[str, Any]:
    """Return a row of bench.json: medians of interleaved repeats, and ratios with their quartiles.

    A cycle runs every contestant at least once. Quick contestants are repeated until they have used about a
    third of the time of the slowest. Our iteration and the floor are repeated equally often and alternate.
    Cycles are repeated until the budget, in seconds, is spent.
    """
    found: dict[str, Iteration] = {"ours_s": ours(case)}
    once = {"ours_s": min(_warm(found["ours_s"], case))}
    # The peak so far is that of our iteration alone, since the others are made only now.
    memory = peak_memory()
    for name, iteration in ({"floor_s": floor(case)} | rivals(case)).items():
        found[name], once[name] = iteration, min(_warm(iteration, case))
    cycle = max(once.values())
    repeats = {name: int(np.clip(0.3 * cycle / took, 1, 10)) for name, took in once.items()}
    repeats["ours_s"] = repeats["floor_s"] = min(repeats["ours_s"], repeats["floor_s"])
    times: dict[str, list[float]] = {name: [] for name in found}
    start, cycles = time.perf_counter(), 0
    while cycles < least or time.perf_counter() - start < budget:
        for turn in range(max(repeats.values())):
            for name, iteration in found.items():
                if turn < repeats[name]:
                    times[name].append(seconds(iteration))
        cycles += 1
        if time.perf_counter() - start > 2 * budget:
            break
    return _row(case, times) | {"peak_memory_mb": memory}


def _warm(iteration: Iteration, case: Case) -> list[float]:
    """Run until every program is likely to be compiled, for at most about 8 seconds, and return the times.

    A program is compiled when its Q is drawn for the first time, which needs several iterations.
    """
    taken: list[float] = []
    while len(taken) < 2 or (len(taken) < 4 * (case.N + 1) and sum(taken) < 8):
        taken.append(seconds(iteration))
    return taken


def _row(case: Case, times: dict[str, list[float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"case": case.name}
    for name in ("ours_s", "floor_s", "torch_loop_s", "torch_func_s"):
        row[name] = float(np.median(times[name])) if name in times else None
    pairs = np.asarray(times["ours_s"]) / np.asarray(times["floor_s"])
    row |= {
        "ours_over_floor": row["ours_s"] / row["floor_s"],
        "quartiles": np.percentile(pairs, [25, 75]).tolist(),
    }
    for rival in ("torch_loop", "torch_func"):
        slower = row[f"{rival}_s"]
        row[f"{rival}_over_ours"] = None if slower is None else slower / row["ours_s"]
    row["repeats"] = {name: len(taken) for name, taken in times.items()}
    row["client_s"] = row["ours_s"] / case.cohort
    row["floor_gflops"] = flop(case) / row["floor_s"] / 1e9
    return row
