"""Why FedAvg with a fine-tuned head is ahead of own heads: is it the body, or the head that tuning starts from?

    python benchmarks/shared_bodies.py [--seeds 2]

In every column of `fedbilevel reproduce personal-heads` it trains a body by FedAvg and one with own heads. Then
every client trains a head on its own rows, by as many steps for both bodies, and is measured on its test rows. The
table has the means over clients and seeds: with heads that start at zero, so that only the bodies differ, and with
heads that start at FedAvg's shared one.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax.numpy as jnp
import numpy as np

import fedbilevel as fb
from fedbilevel.problem import flatten
from fedbilevel.studies.application import Column, load_application

OWN, SHARED = "own heads, true hypergradient", "FedAvg, fine-tuned head"
STEPS = {OWN: {"algorithm.alpha": 0.3}, SHARED: {"algorithm.alpha": 0.3, "algorithm.beta": 0.3}}


def served(column: Column, label: str, seed: int) -> dict[str, float]:
    """Train a body, and return the mean accuracy of the clients by where their heads start."""
    application = load_application("personal-heads")
    row = next(row for row in application.rows if row.label == label)
    spec = application.of(row, column, STEPS[label], seed)
    task: Any = spec.task()
    result = fb.train(
        task.problem, task.clients, spec.algorithm, stop={"rounds": 200}, evaluate={"every": 200}, seed=seed
    )
    x, y = flatten(result.x, "x").vector, flatten(result.y, "y").vector
    starts = {"zero": jnp.zeros_like(y), "shared": y}
    clients = spec.data.clients
    return {name: float(np.mean(task.finding(x, start).values[:clients])) for name, start in starts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    seeds = range(1, parser.parse_args().seeds + 1)
    print("| column | own body, heads from zero | FedAvg's body, heads from zero | FedAvg's body, from its head |")
    print("|---|---|---|---|")
    for column in load_application("personal-heads").columns:
        own, shared = ([served(column, label, seed) for seed in seeds] for label in (OWN, SHARED))
        cells = [[each["zero"] for each in own], *([each[name] for each in shared] for name in ("zero", "shared"))]
        print(
            f"| {column.label} | " + " | ".join(f"{100 * np.mean(cell):.1f} %" for cell in cells) + " |",
            flush=True,
        )


if __name__ == "__main__":
    main()
