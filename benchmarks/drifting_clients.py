"""Client weights when the bad clients drift in: all clients are good at first, and half of them turn bad in turn.

    python benchmarks/drifting_clients.py --out results/drift                   MNIST and Fashion-MNIST, five seeds
    python benchmarks/drifting_clients.py --out results/drift --data mnist --seeds 2

The set-up is that of the preset `client-weights`: 100 clients with 50 unchecked rows and three checked ones each,
and a cohort of ten. A run has four phases of 75 rounds, in which 0, 17, 33 and 50 clients have random labels. A
client that has turned bad stays bad. A run is one federation: a client loads its rows for every round, as they are
then, and no method is told that anything has changed. Only the oracle is told in each phase who is bad.

Of every row four step sizes are tried with seed 0. The one with the best mean of validation accuracies at the ends
of the phases is run with the seeds 1 to 5. Finished runs are kept in results.json and are not done again.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import fedbilevel as fb
from fedbilevel.runtime import prepare_runtime

PHASES = (0.0, 1 / 6, 1 / 3, 1 / 2)  # the share of clients that are bad; a larger share only adds bad clients
ROUNDS = 75  # of a phase
MEASURED = ("test_accuracy", "valid_accuracy", "auc", "weight_good", "weight_bad")


class Row(NamedTuple):
    """A method or a control: its settings, those of the problem, and the step sizes that are tried."""

    method: Any
    step: str
    tries: tuple[float, ...]
    problem: dict[str, Any]


PLAIN = Row(fb.FedAvg(control="lower-only", participation=10), "beta", (0.1, 0.3, 1.0, 2.0), {})
SOBA = Row(fb.FedSOBA(beta=0.5, participation=10), "alpha", (50.0, 100.0, 200.0, 400.0), {})
ROWS = {
    "weights, clipped": SOBA._replace(tries=(1.25, 2.5, 5.0, 10.0), problem={"problem.weights": "clipped"}),
    "weights, sigmoid": SOBA,
    "all clients alike": PLAIN,
    "oracle": PLAIN._replace(problem={"problem.start": "oracle"}),
}


class Drifting:
    """The clients of a row with a seed, in all phases. A client loads its rows for every round, as they are."""

    def __init__(self, row: Row, data: str, seed: int) -> None:
        sets = {"data.name": data, "problem.valid": 500, **row.problem}
        specs = [fb.load_spec("client-weights", {**sets, "problem.bad": bad}) for bad in PHASES]
        self.phase, self.seed, self.row = 0, seed, row
        self.tasks = [spec.problem.task(settings_of(data), seed) for spec in specs]
        first = self.tasks[0].clients
        clients = fb.LazyClients(first.count, first.capacity, lambda i: self.now.clients.load(i), first.size)
        self.engine = fb.Simulation(self.now.problem, clients)

    @property
    def now(self) -> fb.Task:
        """The problem, its clients and its measure in the present phase."""
        return self.tasks[self.phase]

    def run(self, step: float) -> list[dict[str, float]]:
        """What is measured at the end of every phase."""
        method = replace(self.row.method, **{self.row.step: step})
        state = method.init(self.tasks[0].problem, self.engine.clients.count)
        fed, found = fb.Federation(self.engine, seed=self.seed), []
        for self.phase in range(len(PHASES)):
            if "problem.start" in self.row.problem:
                state = state._replace(x=self.now.problem.flat_x.vector)
            for _ in range(ROUNDS):
                state = method.step(fed, state)
            told = self.now.measure(state.x, state.y)
            found.append({"rounds": fed.ledger.rounds} | {k: float(told[k]) for k in MEASURED if k in told})
        self.phase = 0
        return found


@cache
def settings_of(data: str) -> Any:
    """The settings of the data, which hold the data set, so that it is read once."""
    return fb.load_spec("client-weights", {"data.name": data}).data


@lru_cache(maxsize=1)
def drifting(name: str, data: str, seed: int) -> Drifting:
    """The clients of the last row and seed, for which nothing is compiled again."""
    return Drifting(ROWS[name], data, seed)


def text(runs: list[list[dict[str, float]]], phase: int, metric: str) -> str:
    """The mean and the deviation of a metric at the end of a phase; a dash if it is not there."""
    values = [100 * run[phase][metric] for run in runs if metric in run[phase]]
    if not values:
        return "-"
    return f"{np.mean(values):.2f} ± {np.std(values, ddof=1) if len(values) > 1 else 0.0:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--data", nargs="*", default=["mnist", "fashion-mnist"])
    parser.add_argument("--rows", nargs="*", default=list(ROWS))
    parser.add_argument("--seeds", type=int, default=5)
    arguments = parser.parse_args()
    prepare_runtime()
    arguments.out.mkdir(parents=True, exist_ok=True)
    file = arguments.out / "results.json"
    done: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}

    def run(name: str, data: str, seed: int, step: float) -> list[dict[str, float]]:
        key = f"{data}, {name}, {ROWS[name].step} {step:g}, seed {seed}"
        if key not in done:
            done[key] = drifting(name, data, seed).run(step)
            file.write_text(json.dumps(done, indent=1) + "\n")
        return list(done[key])

    for data in arguments.data:
        print(f"\n| {data}: bad clients now | " + " | ".join(f"{100 * bad:.0f} %" for bad in PHASES) + " | step |")
        print("|---|" + "---|" * (len(PHASES) + 1))
        for name in arguments.rows:
            tries = ROWS[name].tries
            tried = [np.mean([p["valid_accuracy"] for p in run(name, data, 0, step)]) for step in tries]
            step = tries[int(np.argmax(tried))]
            runs = [run(name, data, seed, step) for seed in range(1, arguments.seeds + 1)]
            for metric in ("test_accuracy", "auc") if name.startswith("weights") else ("test_accuracy",):
                label = name if metric == "test_accuracy" else f"{name}: AUC"
                cells = [text(runs, phase, metric) for phase in range(len(PHASES))]
                print(f"| {label} | {' | '.join(cells)} | {step:g} |", flush=True)


if __name__ == "__main__":
    main()
