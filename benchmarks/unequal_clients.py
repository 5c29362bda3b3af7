"""Outer iterations on clients of unequal size, in groups of like size beside all padded to the largest client.

    python benchmarks/unequal_clients.py [--iterations 20] [--turns 3] [--cohort 10] [--N 1] [--cases ...]

MNIST on 100 clients: i.i.d., by Dirichlet shares of the labels, and by a power law (a client's share of the rows
is drawn from a Pareto distribution). FBO-AggITD in the paper's set-up with tau 5. Both engines run the same
iterations from the same start, in turns and in one process: first without being timed, so that all programs are
compiled, and then with wall and processor time. It prints for each case

- the largest client over the mean one,
- how many programs each engine compiled, and how long its first turn took,
- the ratio of the iterations' times, old to new, and how far apart the two results are.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from fedbilevel.runtime import prepare_runtime

if __name__ == "__main__":
    prepare_runtime()

import jax
import numpy as np

import fedbilevel as fb
from fedbilevel.data import ClientData, DataSettings, ListedClients, Part
from fedbilevel.engines import Simulation
from fedbilevel.federation import Federation
from fedbilevel.problems import HyperRepresentation

CASES = {
    "iid": {},
    "dirichlet-1": {"alpha": 1.0},
    "dirichlet-0.5": {"alpha": 0.5},
    "dirichlet-0.1": {"alpha": 0.1},
}


def task_of(case: str, seed: int = 0) -> tuple[Any, Any]:
    """The problem and the clients of a case, with their rows in memory."""
    kind = "iid" if case in ("iid", "power") else "dirichlet"
    settings = DataSettings(name="mnist", clients=100, partition=kind, **CASES.get(case, {}))
    task = HyperRepresentation().task(settings, seed)
    data = [task.clients.load(client) for client in range(task.clients.count)]
    if case == "power":
        data = _by_power_law(data, seed)
    return task.problem, ListedClients(data)


def _by_power_law(data: list[ClientData], seed: int) -> list[ClientData]:
    """All rows dealt again, in shares from a Pareto distribution of exponent 1.5; half of a client's are lower."""
    inputs, targets = (np.concatenate([getattr(p, f) for d in data for p in d[:2]]) for f in Part._fields)
    shares = np.random.default_rng(seed).pareto(1.5, len(data)) + 1
    sizes = np.maximum(2, np.floor(shares / shares.sum() * len(inputs))).astype(int)
    ends = np.cumsum(sizes)
    cuts = [(end - size, end - size // 2, end) for size, end in zip(sizes, ends, strict=True)]
    return [ClientData(Part(inputs[a:b], targets[a:b]), Part(inputs[b:c], targets[b:c])) for a, b, c in cuts]


def turn(engine: Simulation, method: Any, iterations: int) -> tuple[Any, float, float]:
    """The state after some iterations, and the seconds of wall and processor time that they took."""
    fed, state = Federation(engine, seed=0), method.init(engine.problem)
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(iterations):
        state = jax.block_until_ready(method.step(fed, state))
    return state, time.perf_counter() - wall, time.process_time() - processor


def compiled() -> list[str]:
    """A list that grows with every program that is compiled."""
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    return seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--N", type=int, default=1)
    parser.add_argument("--cases", nargs="+", default=[*CASES, "power"])
    options = parser.parse_args()
    method = fb.AggITD(N=options.N, alpha=0.01, beta=0.003, lam=0.01, upper_steps=5, participation=options.cohort)
    seen = compiled()
    for case in options.cases:
        problem, clients = task_of(case)
        sizes = [sum(clients.size(client)) for client in range(clients.count)]
        print(f"{case}: the largest client has {max(sizes) / np.mean(sizes):.2f} times the rows of the mean one")
        engines = {"old": Simulation(problem, clients), "new": Simulation(problem, clients)}
        engines["old"]._groups = lambda *_: []  # type: ignore[method-assign]
        states = {}
        for name, engine in engines.items():
            seen.clear()
            states[name], wall, processor = turn(engine, method, options.iterations)
            print(
                f"  {name}: first turn {wall:.1f} s, processor {processor:.1f} s, {len(seen)} programs", flush=True
            )
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in engines}
        for _ in range(options.turns):
            for name, engine in engines.items():
                times[name].append(turn(engine, method, options.iterations)[1:])
        each = {name: np.median(np.asarray(t), axis=0) / options.iterations for name, t in times.items()}
        for i, kind in enumerate(("wall", "processor")):
            old, new = each["old"][i], each["new"][i]
            print(f"  an iteration, {kind}: old {old:.3f} s, new {new:.3f} s, old / new {old / new:.2f}")
        apart = max(
            float(np.linalg.norm(a - b) / np.linalg.norm(b))
            for a, b in zip(jax.tree.leaves(states["new"]), jax.tree.leaves(states["old"]), strict=True)
        )
        print(f"  the results differ by {apart:.1e} of their norms", flush=True)


if __name__ == "__main__":
    main()
