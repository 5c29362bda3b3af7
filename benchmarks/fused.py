"""The README's ridge example on the engines `fused` and `simulation`, side by side in one process.

    python benchmarks/fused.py [--iterations 4000] [--beside REVISION]

prints the rounds a second of both, the ratio, the distance of their results, and how long each takes from nothing
to the first result. The engines take turns, so that what else the machine does falls on all of them. The
simulation is measured on one device, as in a script, and on two, as the command line has them. With a revision,
the simulation of that revision takes turns with them too, in a process of its own.

`fused, rows drawn once` draws the rows of one part of a block and uses them in all others. Its results are wrong.
It says how fast the engine would be if drawing cost nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.runtime import two_devices
from revisions import revision

HERE = Path(__file__).parent
TURNS = 5
SLOWER = 100  # the simulation is given this many times fewer iterations


def ridge() -> tuple[fb.Problem, Any, fb.AggITD]:
    """The example of the README."""
    rng = np.random.default_rng(0)

    def rows(noise: float) -> Any:
        a = rng.normal(size=(50, 5))
        return a, a @ np.arange(5.0) + noise * rng.normal(size=50)

    problem = fb.Problem(
        x=jnp.zeros(1),
        y=jnp.zeros(5),
        lower=lambda x, y, b: b.mean((b.inputs @ y - b.targets) ** 2) + jnp.exp(x[0]) * jnp.sum(y**2),
        upper=lambda x, y, b: b.mean((b.inputs @ y - b.targets) ** 2),
    )
    clients = fb.clients_from([(rows(n), rows(n)) for n in (0.1, 1.0, 3.0, 5.0)])
    return problem, clients, fb.AggITD(N=10, alpha=0.5, beta=0.05, lam=0.05, participation=1.0)


def timed(engine: Any, iterations: int) -> tuple[fb.Result, float, float]:
    """A run on an engine, its rounds a second of wall time, and its rounds a second of processor time."""
    problem, clients, method = PROBLEM
    rules = {"every": iterations, "checkpoint_every": iterations}
    wall, processor = time.perf_counter(), time.process_time()
    result = fb.train(problem, clients, method, stop={"iterations": iterations}, engine=engine, evaluate=rules)
    wall, processor = time.perf_counter() - wall, time.process_time() - processor
    rounds = result.summary["rounds"]
    return result, rounds / wall, rounds / processor


@contextmanager
def drawn_once() -> Iterator[None]:
    """Let the fused engine draw the rows of an argument once for each shape, and use them again."""
    from fedbilevel.fused import _blocks  # older revisions do not have these two
    from fedbilevel.steps import draw_ahead

    known: dict[Any, Any] = {}

    def drawn(descriptor: Any, name: str, calls: Any, *others: Any) -> Any:
        key = name, calls.clients.shape
        if key not in known:
            known[key] = draw_ahead(descriptor, name, calls, *others)
        return known[key]

    with patch.object(_blocks, "draw_ahead", drawn):
        yield


def cold(engine: str) -> tuple[float, float]:
    """How long a run of one iteration takes in a process of its own, which compiles everything."""
    script = (
        "import fused, time; problem, clients, method = fused.ridge()\n"
        "start = time.perf_counter(), time.process_time()\n"
        f"fused.fb.train(problem, clients, method, stop={{'iterations': 1}}, engine={engine!r})\n"
        "print(time.perf_counter() - start[0], time.process_time() - start[1])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=HERE)
    wall, processor = map(float, done.stdout.split())
    return wall, processor


def older(source: Path, iterations: int) -> tuple[float, float]:
    """The rounds a second of the simulation of older sources, by the clock and in processor time."""
    script = (
        "import fused; fused.PROBLEM = fused.ridge(); problem, clients, _ = fused.PROBLEM\n"
        "engine = fused.fb.Simulation(problem, clients)\n"
        f"fused.timed(engine, {iterations}); print(*fused.timed(engine, {iterations})[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=HERE,
        env=os.environ | {"PYTHONPATH": str(source)},
    )
    wall, processor = map(float, done.stdout.split())
    return wall, processor


PROBLEM: Any = ()


def main() -> None:
    """Measure and print."""
    global PROBLEM
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--iterations", type=int, default=4000, help="outer iterations of a run on the fused engine"
    )
    parser.add_argument("--beside", metavar="REVISION", help="also the simulation of an older revision")
    asked = parser.parse_args()
    two_devices()
    PROBLEM = ridge()
    problem, clients, _ = PROBLEM
    engines = {
        "fused": fb.Fused(problem, clients),
        "simulation": fb.Simulation(problem, clients, devices=1),
        "simulation on two devices": fb.Simulation(problem, clients),
    }
    few = max(1, asked.iterations // SLOWER)
    lengths = dict.fromkeys(engines, few) | {"fused": asked.iterations}
    ends = {name: timed(engine, few)[0] for name, engine in engines.items()}
    one, other = ends["fused"], ends["simulation"]
    pairs = zip((one.x, one.y), (other.x, other.y), strict=True)
    apart = max(float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in pairs)
    timed(engines["fused"], asked.iterations)  # compiles the program of a longer block
    with revision(asked.beside) if asked.beside else nullcontext() as source:
        turns = list[dict[str, tuple[float, float]]]()
        for _ in range(TURNS):
            turn = {name: timed(engine, lengths[name])[1:] for name, engine in engines.items()}
            with drawn_once():
                turn["fused, rows drawn once"] = timed(engines["fused"], asked.iterations)[1:]
            turns.append(turn if source is None else turn | {f"simulation of {asked.beside}": older(source, few)})
    for at, what in enumerate(("wall", "processor")):
        for name in turns[0]:
            rate = statistics.median(turn[name][at] for turn in turns)
            ratios = sorted(turn["fused"][at] / turn[name][at] for turn in turns)
            told = f"; fused {statistics.median(ratios):.3g} times as many ({ratios[0]:.3g} to {ratios[-1]:.3g})"
            print(f"{name}: {rate:,.0f} rounds a second of {what} time{told if name != 'fused' else ''}")
    print(f"x and y of fused and simulation after {few} iterations: {apart:.1e} apart")
    starts: dict[str, list[tuple[float, float]]] = {"fused": [], "simulation": []}
    for _ in range(3):
        for name, seconds in starts.items():
            seconds.append(cold(name))
    for name, seconds in starts.items():
        wall, processor = (statistics.median(each) for each in zip(*seconds, strict=True))
        print(f"{name}: first result after {wall:.2f} s, {processor:.2f} s of processor time")


if __name__ == "__main__":
    main()
