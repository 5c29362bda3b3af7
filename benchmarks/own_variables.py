"""A million rows with a weight each: bytes, memory and time of an outer iteration, with and without the weights.

Set-up: 100 clients with 10,000 rows of 5 features, of which 30 % have a target with the wrong sign, and 200 rows
that are right; linear regression, FBO-AggITD with the summed estimator, N = 5, all clients in every iteration.
The clients share x, the logarithm of a ridge weight. There are no weights of rows ("none"), or they are own
variables of the clients ("own"), or they are in x as well ("x"). Each case is a fresh process, and the processes
run in turn. The ledger has the bytes of all clients.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.metrics import roc_auc_score

import fedbilevel as fb
from fedbilevel.runtime import peak_memory

CASES = ("none", "own", "x")
FEATURES, CLEAN, WRONG = 5, 200, 0.3


def made(clients: int, rows: int) -> tuple[fb.ListedClients, np.ndarray]:
    """The clients, and which of their rows are wrong."""
    rng = np.random.default_rng(0)

    def part(count: int, wrong: np.ndarray) -> tuple[Any, np.ndarray]:
        inputs = rng.normal(size=(count, FEATURES)).astype(np.float32)
        targets = np.where(wrong, -1, 1) * inputs.sum(1) + 0.5 * rng.normal(size=count)
        return inputs, targets.astype(np.float32)

    wrong = rng.random((clients, rows)) < WRONG
    place = np.arange(clients * rows, dtype=np.int32).reshape(clients, rows)
    parts = []
    for i in range(clients):
        inputs, targets = part(rows, wrong[i])
        parts.append((({"row": place[i], "features": inputs}, targets), part(CLEAN, np.zeros(CLEAN, bool))))
    return fb.clients_from(parts), wrong


def problem(case: str, count: int) -> fb.Problem:
    """The problem without weights, with own ones, or with so many in x."""

    def lower(x: Any, y: jax.Array, b: fb.Batch) -> jax.Array:
        error = (b.inputs["features"] @ y - b.targets) ** 2
        if case != "none":
            error *= jax.nn.sigmoid(b.own[b.ids] if case == "own" else x["weights"][b.inputs["row"]])
        return b.mean(error) + 0.01 * jnp.exp(x["ridge"]) * jnp.sum(y**2)

    def upper(x: Any, y: jax.Array, b: fb.Batch) -> jax.Array:
        return b.mean((b.inputs @ y - b.targets) ** 2)

    x = {"ridge": jnp.zeros(())} | ({"weights": jnp.zeros(count)} if case == "x" else {})
    return fb.Problem(x, jnp.zeros(FEATURES), lower, upper, own=fb.PerRow("lower") if case == "own" else None)


def alone(case: str, clients: int, rows: int, iterations: int) -> dict[str, Any]:
    """One case in this process: what an outer iteration costs, and how well the weights tell the wrong rows."""
    data, wrong = made(clients, rows)
    each = problem(case, clients * rows)
    own_step = float(rows) if case == "own" else None
    alpha = float(rows * clients) if case == "x" else 0.01
    settings: dict[str, Any] = dict(N=5, beta=0.1, lam=0.1, lower_steps=5, batch_zeta_local="full")
    method = fb.AggITD(**settings, participation=1.0, estimator="summed", alpha=alpha, own_step=own_step)
    engine = fb.Simulation(each, data)
    fed, state, seconds = fb.Federation(engine), method.init(each, clients), []
    for _ in range(iterations):
        wall, processor = time.perf_counter(), time.process_time()
        state = method.step(fed, state)
        state.y.block_until_ready()
        seconds.append((time.perf_counter() - wall, time.process_time() - processor))
    later = np.median(seconds[1:] or seconds, axis=0)  # the first one compiles
    found: dict[str, Any] = {
        "case": case,
        "rounds": fed.ledger.rounds / iterations,
        "bytes": (fed.ledger.bytes_up + fed.ledger.bytes_down) / iterations,
        "wall_s": later[0],
        "processor_s": later[1],
        "peak_mb": peak_memory(),
    }
    if case != "none":
        weights = (
            each.flat_x.restore(state.x)["weights"] if fed.own is None else np.concatenate([*fed.own.values()])
        )
        found["auc"] = float(roc_auc_score(wrong.ravel(), -np.asarray(weights)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--rows", type=int, default=10_000, help="rows of a client")
    parser.add_argument("--iterations", type=int, default=10, help="outer iterations of each case")
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=CASES)
    parser.add_argument("--here", action="store_true", help="one case, in this process, as JSON")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    sizes = options.clients, options.rows, options.iterations
    if options.here:
        print(json.dumps(alone(options.cases[0], *sizes)))
        return
    table = []
    for case in options.cases:
        arguments = [
            f"--{name}={value}" for name, value in zip(("clients", "rows", "iterations"), sizes, strict=True)
        ]
        command = [sys.executable, __file__, "--here", "--cases", case, *arguments]
        table.append(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))
        print(
            "  ".join(
                f"{name} {value:.5g}" if name != "case" else f"{value:5}" for name, value in table[-1].items()
            )
        )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        (options.out / "own_variables.json").write_text(json.dumps(table, indent=2) + "\n")


if __name__ == "__main__":
    main()
