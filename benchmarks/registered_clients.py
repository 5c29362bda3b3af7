"""One million registered clients against one thousand: peak memory, time to start, and time of an outer iteration.

Set-up: the embedded digits, partition `drawn` with 100 rows a client, a cohort of 100, MLP 64-200-10, N = 1,
τ = 5. Memory is the peak of a fresh process that starts and makes a few outer iterations; the processes run in
turn. Time is taken within one process that has both federations and serves them in turn, so that what else the
machine does falls on both: wall clock, and seconds of the processor, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import fedbilevel as fb
from fedbilevel.runtime import peak_memory

FEW, MANY = 1_000, 1_000_000
SETTINGS = {
    "data.name": "digits",
    "data.partition": "drawn",
    "algorithm.participation": 100,
    "stop.iterations": 1,
}


def federation(clients: int, changes: dict[str, int]) -> Callable[[], None]:
    """A federation of so many clients, as the function that makes one outer iteration of it."""
    spec = fb.load_spec(None, SETTINGS | {"data.clients": clients} | changes)
    task = spec.task()
    fed = fb.Federation(spec.federation.build(task.problem, task.clients), seed=spec.seed)
    state = spec.algorithm.init(task.problem, clients)

    def iterate() -> None:
        nonlocal state
        state = spec.algorithm.step(fed, state)
        state.x.block_until_ready()

    return iterate


def alone(clients: int, iterations: int, changes: dict[str, int]) -> dict[str, float]:
    """What one process takes: seconds until the federation is there, and its peak memory in MB."""
    begin = time.perf_counter()
    iterate = federation(clients, changes)
    started = time.perf_counter() - begin
    for _ in range(iterations):
        iterate()
    return {"clients": clients, "start_s": started, "peak_mb": peak_memory()}


def fresh(clients: int, iterations: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--clients", str(clients), "--iterations", str(iterations)]
    return dict(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def in_turn(repeats: int) -> np.ndarray:
    """Wall and processor seconds of one outer iteration: (repeats, two federations, two clocks)."""

    def cost(iterate: Callable[[], None]) -> tuple[float, float]:
        wall, processor = time.perf_counter(), time.process_time()
        iterate()
        return time.perf_counter() - wall, time.process_time() - processor

    pair = [federation(clients, {}) for clients in (FEW, MANY)]
    for iterate in pair * 4:  # both values of Q are compiled
        iterate()
    return np.asarray([[cost(iterate) for iterate in pair] for _ in range(repeats)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30, help="outer iterations of each that are timed")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes of each for memory")
    parser.add_argument("--iterations", type=int, default=3, help="outer iterations of a fresh process")
    parser.add_argument("--clients", type=int, help="measure so many clients in this process alone, as JSON")
    parser.add_argument(
        "--set", nargs="*", default=[], metavar="KEY=NUMBER", help="with --clients: smaller settings"
    )
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.clients is not None:
        changes = {key: int(value) for key, value in (pair.split("=") for pair in options.set)}
        print(json.dumps(alone(options.clients, options.iterations, changes)))
        return
    runs = [[fresh(clients, options.iterations) for clients in (FEW, MANY)] for _ in range(options.processes)]
    row: dict[str, float] = {}
    for name in ("peak_mb", "start_s"):
        row[f"{name}_few"], row[f"{name}_many"] = np.median([[r[name] for r in pair] for pair in runs], axis=0)
    row["memory_ratio"] = row["peak_mb_many"] / row["peak_mb_few"]
    medians = np.median(in_turn(options.repeats), axis=0)
    for i, clock in enumerate(("wall", "processor")):
        row[f"{clock}_s_few"], row[f"{clock}_s_many"] = medians[:, i]
        row[f"{clock}_ratio"] = medians[1, i] / medians[0, i]
    for name, value in row.items():
        print(f"{name:18} {value:.4g}")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "registered.json").write_text(json.dumps(row, indent=2) + "\n")


if __name__ == "__main__":
    main()
