"""Many runs in one program beside the same runs one after the other, and in processes of their own.

    python benchmarks/many.py [--rounds 1000] [--turns 3] [--processes 4] [--all-processes]

The quadratic problem with ten clients; FBO-AggITD with N = 1 and the paper's sampled Q; 24 settings (six alpha
times four beta) and five seeds, with one evaluation at the start and one at the end. It prints

- how long `train_many` takes from nothing, and how long the runs take in the same process one after the other, for
  which every setting compiles a program of its own;
- how long both take if everything is compiled already, in turns;
- how long a fused run takes in a process of its own, from a sample of processes (--all-processes: all of them);
- how far each record is from that of its single run, and whether the books are equal.

Seconds depend on what else the machine does, and the ratios of processor time less so.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel.problems import Quadratic

HERE = Path(__file__).parent
METHOD = fb.AggITD(N=1, lam=0.3, participation=1.0, lower_steps=5, batch_zeta_local=2)
SETTINGS: list[dict[str, Any]] = [
    {"alpha": alpha, "beta": beta}
    for alpha, beta in itertools.product((0.01, 0.02, 0.05, 0.1, 0.15, 0.2), (0.02, 0.05, 0.1, 0.3))
]
SEEDS = range(5)


def clock() -> tuple[float, float]:
    """Seconds of wall time and of processor time."""
    return time.perf_counter(), time.process_time()


def since(start: tuple[float, float]) -> tuple[float, float]:
    wall, processor = clock()
    return wall - start[0], processor - start[1]


def options(rounds: int) -> dict[str, Any]:
    return dict(stop={"rounds": rounds}, evaluate={"every": rounds, "checkpoint_every": rounds})


def task() -> Any:
    return Quadratic(noise=1.0).make(clients=10, seed=0)


def together(made: Any, engine: Any, rounds: int) -> list[fb.Result]:
    """All runs by `train_many`."""
    problem, clients = made.problem, made.clients
    return fb.train_many(
        problem, clients, METHOD, settings=SETTINGS, seeds=SEEDS, engine=engine, **options(rounds)
    )


def one(made: Any, engine: Any, rounds: int, own: dict[str, Any], seed: int) -> fb.Result:
    method = dataclasses.replace(METHOD, **own)
    return fb.train(made.problem, made.clients, method, engine=engine, seed=seed, **options(rounds))


def in_turn(made: Any, engine: Any, rounds: int) -> list[fb.Result]:
    """All runs one after the other in this process."""
    return [one(made, engine, rounds, own, seed) for own, seed in itertools.product(SETTINGS, SEEDS)]


def books(result: fb.Result) -> Any:
    return [
        {step: {k: v for k, v in account.items() if k != "seconds"} for step, account in accounts.items()}
        for accounts in (result.summary["ledger"], result.summary["probes"])
    ]


def apart(a: fb.Result, b: fb.Result) -> float:
    """The largest relative distance of x, y and the lines of the history."""
    far = [
        float(np.linalg.norm(p - q) / max(float(np.linalg.norm(q)), 1e-12)) for p, q in ((a.x, b.x), (a.y, b.y))
    ]
    for line, same in zip(a.history, b.history, strict=True):
        for name in ("upper_loss", "lower_loss"):
            far.append(abs(line[name] - same[name]) / max(abs(same[name]), 1e-12))
    return max(far)


def own_process(rounds: int, number: int) -> tuple[float, float]:
    """A run in a process of its own, from the start of Python to its end."""
    own, seed = [*itertools.product(SETTINGS, SEEDS)][number]
    script = f"import many; many.one(many.task(), 'fused', {rounds}, {own!r}, {seed})"
    return _process(script)


def _process(script: str) -> tuple[float, float]:
    before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run([sys.executable, "-c", script], check=True, cwd=HERE, capture_output=True)
    after, wall = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter() - start
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def told(name: str, seconds: tuple[float, float], than: tuple[float, float] | None = None) -> None:
    ratio = "" if than is None else f"; train_many is {seconds[0] / than[0]:.1f} times faster"
    ratio += "" if than is None else f", {seconds[1] / than[1]:.1f} times by processor time"
    print(f"{name}: {seconds[0]:.2f} s, {seconds[1]:.2f} s of processor time{ratio}", flush=True)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1000, help="communication rounds of a run")
    parser.add_argument("--turns", type=int, default=3, help="turns of the warm comparison")
    parser.add_argument("--processes", type=int, default=4, help="how many processes are measured")
    parser.add_argument("--all-processes", action="store_true", help="measure all processes")
    asked = parser.parse_args()
    count, rounds = len(SETTINGS) * len(SEEDS), asked.rounds
    made = task()
    engine = fb.Fused(made.problem, made.clients)
    start = clock()
    many = together(made, engine, rounds)
    cold = since(start)
    told(f"train_many, {count} runs of {rounds} rounds, from nothing", cold)
    start = clock()
    singles = in_turn(made, engine, rounds)
    told("one after the other, from nothing", since(start), cold)
    far = max(apart(a, b) for a, b in zip(many, singles, strict=True))
    equal = all(books(a) == books(b) for a, b in zip(many, singles, strict=True))
    failed = sum(result.failure is not None for result in many)
    same = [a.failure for a in many] == [b.failure for b in singles]
    print(f"records: {far:.1e} apart at most; books equal: {equal}; {failed} runs diverged, reasons equal: {same}")
    warm: dict[str, list[tuple[float, float]]] = {"train_many": [], "in turn": []}
    for _ in range(asked.turns):
        for name, work in (("train_many", together), ("in turn", in_turn)):
            start = clock()
            work(made, engine, rounds)
            warm[name].append(since(start))
    best = tuple(statistics.median(each) for each in zip(*warm["train_many"], strict=True))
    other = tuple(statistics.median(each) for each in zip(*warm["in turn"], strict=True))
    told("train_many, everything compiled", (best[0], best[1]))
    told("one after the other, everything compiled", (other[0], other[1]), (best[0], best[1]))
    numbers = range(count) if asked.all_processes else np.linspace(0, count - 1, asked.processes).astype(int)
    script = f"import many; t = many.task(); many.together(t, 'fused', {rounds})"
    whole = _process(script)
    told("train_many in a process of its own, from the start of Python", whole)
    each = [own_process(rounds, int(number)) for number in numbers]
    print("a run in a process of its own:", json.dumps([[round(s, 2) for s in own] for own in each]))
    mean = tuple(count * statistics.mean(seconds) for seconds in zip(*each, strict=True))
    name = f"{count} processes one after the other, " + (
        "all measured" if asked.all_processes else f"from {len(each)} measured"
    )
    told(f"{name}, beside train_many in this process", (mean[0], mean[1]), cold)
    told(f"{name}, beside train_many in a process of its own", (mean[0], mean[1]), whole)
    print(f"load: {os.getloadavg()[0]:.1f}, cores: {os.cpu_count()}")


if __name__ == "__main__":
    main()
