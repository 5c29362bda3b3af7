"""FedSOBA with automatic step sizes on twelve quadratics, beside the best of 24 constant settings.

    python benchmarks/single_loop_steps.py --out results/single          # all twelve
    python benchmarks/single_loop_steps.py --out results/single --only 1-100-half

The problems are `Quadratic(heterogeneity=h, condition=k)` with ten clients and seed 0, for h = 0, 1, 3 and k = 10,
100, and a cohort of all clients or of half of them. A run has arrived when ||∇f|| stays below 1 % of its start
until the end of its budget; with a cohort of a half, the median of three seeds counts. The grid has six alphas and
four betas (rho = beta). It is run for 100 iterations, and if no point has arrived, for 1,000 and for 3,000. The
rounds of "auto" include those of its measurement, which are told apart.

Every result is a JSON file in the folder, and one that is there is not computed again. The table of docs/steps.md
is printed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel.problems import QuadraticTask

ALPHAS, BETAS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), (0.1, 0.3, 1.0, 1.5)
BUDGETS = ((100, 1), (1000, 10), (3000, 25))  # iterations, and how often the state is measured
CASES = {
    f"{h}-{k}-{cohort}": (float(h), float(k), share)
    for h, k, (cohort, share) in itertools.product((0, 1, 3), (10, 100), (("all", 1.0), ("half", 0.5)))
}


def arrived(result: Any, task: QuadraticTask) -> int | None:
    """The rounds after which ||∇f|| stays below 1 % of its first value; None if it does not."""
    target = 0.01 * float(np.linalg.norm(task.hypergradient(np.zeros(task.size_x))))
    found = None
    for record in result.history:
        value = record["hypergradient_norm"]
        if value is None or not value < target:
            found = None
        elif found is None:
            found = record["rounds"]
    return None if result.failure else found


def median(found: list[int | None]) -> float | None:
    value = float(np.median([np.inf if each is None else each for each in found]))
    return value if np.isfinite(value) else None


def best_of_grid(task: QuadraticTask, share: float, seeds: list[int]) -> dict[str, Any]:
    points = [dict(alpha=alpha, beta=beta) for alpha, beta in itertools.product(ALPHAS, BETAS)]
    for iterations, every in BUDGETS:
        results = fb.train_many(
            task.problem,
            task.clients,
            fb.FedSOBA(participation=share),
            settings=points,
            seeds=seeds,
            stop={"iterations": iterations},
            evaluate={"every": every, "checkpoint_every": iterations},
            measure=task.measure,
        )
        own = [arrived(each, task) for each in results]
        found = [median(own[at : at + len(seeds)]) for at in range(0, len(own), len(seeds))]
        known = [(rounds, at) for at, rounds in enumerate(found) if rounds is not None]
        if known:
            rounds, at = min(known)
            near = sum(each <= 2 * rounds for each, _ in known)
            return {"rounds": rounds, "within twice": near, "budget": iterations, **points[at]}
    return {"rounds": None, "within twice": 0, "budget": iterations}


def automatic(task: QuadraticTask, share: float, seeds: list[int], budget: int) -> dict[str, Any]:
    engine, found, spent = fb.Simulation(task.problem, task.clients, devices=1), list[int | None](), list[int]()
    every = 1 if budget <= 300 else 10
    for seed in seeds:
        result = fb.train(
            task.problem,
            task.clients,
            fb.FedSOBA(alpha=fb.AUTO, beta=fb.AUTO, participation=share),
            stop={"rounds": budget},
            evaluate={"every": every, "checkpoint_every": budget},
            measure=task.measure,
            engine=engine,
            seed=seed,
        )
        found.append(arrived(result, task))
        spent.append(result.summary["steps"]["rounds"])
        values = result.summary["steps"]["values"]
    return {"rounds": median(found), "measurement": float(np.median(spent)), **values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=list(CASES))
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    lines = [
        "| h, condition, cohort | best of the grid | points within twice | auto | of these to measure |",
        "|---|---|---|---|---|",
    ]
    for name in options.only or CASES:
        h, condition, share = CASES[name]
        file = options.out / f"{name}.json"
        if not file.exists():
            task = fb.Quadratic(heterogeneity=h, condition=condition).make(10, 0)
            seeds = [0] if share == 1.0 or h == 0 else [0, 1, 2]
            grid = best_of_grid(task, share, seeds)
            auto = automatic(task, share, seeds, max(300, grid["budget"]))
            file.write_text(json.dumps({"grid": grid, "auto": auto}, indent=2) + "\n")
            print(name, grid, auto, flush=True)
        made = json.loads(file.read_text())
        told = [
            "none" if made[which]["rounds"] is None else f"{made[which]['rounds']:.0f}"
            for which in ("grid", "auto")
        ]
        more = f"{made['grid']['within twice']} of 24"
        lines.append(f"| {name} | {told[0]} | {more} | {told[1]} | {made['auto']['measurement']:.0f} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
