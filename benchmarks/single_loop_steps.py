"""FedSOBA with automatic step sizes on twelve quadratics, beside the best of 24 settings of three kinds.

    python benchmarks/single_loop_steps.py --out results/single                       # all twelve
    python benchmarks/single_loop_steps.py --out results/single --only 1-100-half
    python benchmarks/single_loop_steps.py --out results/single --held-out            # nothing was chosen on these

The problems are `Quadratic(heterogeneity=h, condition=k)` with ten clients and seed 0, for h = 0, 1, 3 and k = 10,
100, and a cohort of all clients or of half of them. A run has arrived when ||∇f|| stays below 1 % of its start
until the end of its budget; with a part of the clients, the median of three seeds counts. "auto" has
`correction = "saga"` with a part of the clients. Its rounds include everything, as it measures nothing beforehand.

A grid has six alphas and four betas (rho = beta). There are three kinds of it: constant steps; steps that fall
with 1/sqrt(1 + t/10); and constant steps with `correction = "saga"`, which is run where clients differ and a part
of them takes part. A grid is run for 100 iterations, and if no point has arrived, for 1,000 and for 3,000 (saga:
100 and 300).

Every result is a JSON file in the folder, and one that is there is not computed again. The table of docs/steps.md
is printed at the end.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedbilevel as fb
from fedbilevel.problems import QuadraticTask

ALPHAS, BETAS = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), (0.1, 0.3, 1.0, 1.5)
POINTS = [dict(alpha=alpha, beta=beta) for alpha, beta in itertools.product(ALPHAS, BETAS)]
BUDGETS = ((100, 1), (1000, 10), (3000, 25))  # iterations, and how often the state is measured
CORRECTED = ((100, 1), (300, 1))
FALLING = {"name": "power", "exponent": 0.5, "offset": 10.0}
AUTO_BUDGET = 300


class Case(NamedTuple):
    """A quadratic problem and a cohort."""

    h: float
    condition: float
    share: float
    clients: int = 10
    seed: int = 0
    sizes: tuple[int, int] = (10, 8)

    def task(self) -> QuadraticTask:
        p, q = self.sizes
        made = fb.Quadratic(heterogeneity=self.h, condition=self.condition, size_x=p, size_y=q)
        return made.make(self.clients, self.seed)

    @property
    def seeds(self) -> list[int]:
        return [0] if self.share == 1.0 else [0, 1, 2]

    @property
    def corrected(self) -> fb.FedSOBA:
        return fb.FedSOBA(participation=self.share, correction="none" if self.share == 1.0 else "saga")


CASES = {
    f"{h}-{k}-{cohort}": Case(float(h), float(k), share)
    for h, k, (cohort, share) in itertools.product((0, 1, 3), (10, 100), (("all", 1.0), ("half", 0.5)))
}
HELD_OUT = {
    "1-10-all, seed 7": Case(1.0, 10.0, 1.0, seed=7),
    "2-30-half, seed 8": Case(2.0, 30.0, 0.5, seed=8),
    "0.5-300-all, seed 9, 40 + 30": Case(0.5, 300.0, 1.0, seed=9, sizes=(40, 30)),
    "1-1000-half, seed 10, 20 clients": Case(1.0, 1000.0, 0.5, 20, 10),
    "3-10-tenth, seed 11, 20 clients": Case(3.0, 10.0, 0.1, 20, 11),
    "1-100-tenth, seed 12, 50 clients": Case(1.0, 100.0, 0.1, 50, 12),
    "0.3-30-fifth, seed 13, 10 clients, 40 + 30": Case(0.3, 30.0, 0.2, 10, 13, (40, 30)),
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


def best(case: Case, method: fb.FedSOBA, budgets: tuple[tuple[int, int], ...]) -> dict[str, Any]:
    """The best of the 24 points, with the first budget in which one arrives."""
    task = case.task()
    for iterations, every in budgets:
        how: dict[str, Any] = dict(
            stop={"iterations": iterations},
            evaluate={"every": every, "checkpoint_every": iterations},
            measure=task.measure,
        )
        if method.correction == "none":
            given = dict(settings=POINTS, seeds=case.seeds)
            results = fb.train_many(task.problem, task.clients, method, **given, **how)
        else:
            results = corrected_runs(task, case, method, how)
        own = [None if each is None else arrived(each, task) for each in results]
        found = [median(own[at : at + len(case.seeds)]) for at in range(0, len(own), len(case.seeds))]
        known = [(rounds, at) for at, rounds in enumerate(found) if rounds is not None]
        if known:
            rounds, at = min(known)
            near = sum(each <= 2 * rounds for each, _ in known)
            return {"rounds": rounds, "within twice": near, "budget": iterations, **POINTS[at]}
    return {"rounds": None, "within twice": 0, "budget": iterations}


def corrected_runs(task: QuadraticTask, case: Case, method: fb.FedSOBA, how: dict[str, Any]) -> list[Any]:
    """The runs of all points one after the other, since clients keep something; None for those that diverged."""
    engine, results = fb.Simulation(task.problem, task.clients, devices=1), []
    for point, seed in itertools.product(POINTS, case.seeds):
        own = fb.FedSOBA(participation=case.share, correction=method.correction, **point)
        try:
            results.append(fb.train(task.problem, task.clients, own, engine=engine, seed=seed, **how))
        except fb.Diverged:
            results.append(None)
    return results


def automatic(case: Case) -> dict[str, Any]:
    """The rounds of "auto", the median over the seeds."""
    task = case.task()
    engine, found = fb.Simulation(task.problem, task.clients, devices=1), list[int | None]()
    for seed in case.seeds:
        result = fb.train(
            task.problem,
            task.clients,
            fb.FedSOBA(
                alpha=fb.AUTO, beta=fb.AUTO, participation=case.share, correction=case.corrected.correction
            ),
            stop={"rounds": AUTO_BUDGET},
            evaluate={"every": 1, "checkpoint_every": AUTO_BUDGET},
            measure=task.measure,
            engine=engine,
            seed=seed,
        )
        found.append(arrived(result, task))
    return {"rounds": median(found), "each": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", action="append", choices=[*CASES, *HELD_OUT])
    parser.add_argument("--held-out", action="store_true")
    parser.add_argument("--parts", nargs="*", default=["auto", "saga", "constant", "falling"])
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    cases = CASES | HELD_OUT
    names = options.only or list(HELD_OUT if options.held_out else CASES)
    parts: dict[str, Callable[[Case], dict[str, Any]]] = {
        "auto": automatic,
        "saga": lambda case: best(case, case.corrected, CORRECTED),
        "constant": lambda case: best(case, fb.FedSOBA(participation=case.share), BUDGETS),
        "falling": lambda case: best(case, fb.FedSOBA(participation=case.share, schedule=FALLING), BUDGETS[:2]),
    }
    for part, name in itertools.product(options.parts, names):
        case, file = cases[name], options.out / f"{name} {part}.json"
        idle = (part == "saga" and (case.share == 1.0 or case.h == 0)) or (part == "falling" and case.share == 1.0)
        if not idle and not file.exists():
            file.write_text(json.dumps(parts[part](case), indent=2) + "\n")
            print(name, part, json.loads(file.read_text()), flush=True)
    print("| h, condition, cohort | constant steps | falling steps | saga | auto |\n|---|---|---|---|---|")
    for name in names:
        told = []
        for part in ("constant", "falling", "saga", "auto"):
            file = options.out / f"{name} {part}.json"
            made = json.loads(file.read_text()) if file.exists() else None
            told.append("" if made is None else "none" if made["rounds"] is None else f"{made['rounds']:.0f}")
        print(f"| {name} | {' | '.join(told)} |")


if __name__ == "__main__":
    main()
