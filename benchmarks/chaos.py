"""Each algorithm with faults on purpose beside the same run without: accuracy, and what was injected and noticed.

python benchmarks/chaos.py                    # all algorithms, 200 outer iterations on digits
python benchmarks/chaos.py --algorithms fbo-aggitd fednest --iterations 50
"""

from __future__ import annotations

import argparse
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from fedbilevel import load_spec, run
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.layers import ChaosSettings

FAULTS = ChaosSettings(drop=0.3, nan=0.05, shape=0.05, late=0.05)
DATA: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 20,
    "data.partition": "iid",
    "problem.hidden": 32,
    "federation.deadline": 60.0,
    "stop.rounds": None,
}
STEPS: dict[str, dict[str, Any]] = {  # of an algorithm on this small data set
    "fbo-aggitd": {"algorithm.alpha": 0.3, "algorithm.beta": 0.01, "algorithm.participation": 10},
    "fednest": {"algorithm.alpha": 0.3, "algorithm.beta": 0.01, "algorithm.participation": 10},
    "lfednest": {"algorithm.alpha": 0.3, "algorithm.beta": 0.01, "algorithm.participation": 10},
    "gossip": {
        "problem.hidden": 8,
        "problem.regulariser": "ridge",
        "algorithm.alpha": 0.2,
        "algorithm.gamma": 0.1,
        "algorithm.beta": 0.3,
    },
    "ma-dsbo": {"problem.regulariser": "ridge", "algorithm.alpha": 0.3, "algorithm.beta": 0.3},
}
NOTICED = {"no answer": "no answer", "late": "late", "finite": "not finite", "shape": "another shape"}


def compare(name: str, iterations: int, place: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The summaries of a clean run and of one with faults."""
    changes = {"algorithm.name": name, **DATA, **STEPS[name], "stop.iterations": iterations}
    spec = load_spec("paper", changes)
    return run(spec, place / f"{name}-clean").summary, run(spec, place / name, chaos=FAULTS).summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--algorithms", nargs="+", choices=list(ALGORITHMS), default=list(ALGORITHMS))
    parser.add_argument("--iterations", type=int, default=200)
    arguments = parser.parse_args()
    table = Table(title=f"{arguments.iterations} outer iterations on digits; mean of the last 500 rounds")
    for column in ("algorithm", "clean", "with faults", "difference", "injected", "noticed"):
        table.add_column(column, overflow="fold")
    with tempfile.TemporaryDirectory() as place:
        for name in arguments.algorithms:
            clean, faulty = compare(name, arguments.iterations, Path(place))
            a, b = (s["accuracy"]["mean"] for s in (clean, faulty))
            injected = told(by_reason(faulty["injected"]))
            noticed = told(in_kinds(by_reason(faulty["rejected"])))
            table.add_row(name, f"{a:.2%}", f"{b:.2%}", f"{100 * (b - a):+.2f}", injected, noticed)
    Console(width=150).print(table)


def by_reason(nested: dict[str, dict[str, dict[str, int]]]) -> dict[str, int]:
    """The counts of a summary, which are by step, by client and by reason, added up by reason."""
    found: Counter[str] = Counter()
    for clients in nested.values():
        for counts in clients.values():
            found.update(counts)
    return dict(found)


def in_kinds(counts: dict[str, int]) -> dict[str, int]:
    """Reasons without the name of the vector and its size."""
    found: Counter[str] = Counter()
    for reason, count in counts.items():
        found[next((kind for word, kind in NOTICED.items() if word in reason), reason)] += count
    return dict(found)


def told(counts: dict[str, int]) -> str:
    """Counts by reason as text, with the sum first."""
    return f"{sum(counts.values())}: " + ", ".join(f"{n} {why}" for why, n in sorted(counts.items()))


if __name__ == "__main__":
    main()
