"""Rounds, megabytes and seconds of methods to 90 % test accuracy on shards of MNIST, ten of 100 clients a round.

    python benchmarks/mnist_to_90.py --out results/to-90                          all methods, five seeds
    python benchmarks/mnist_to_90.py --out results/to-90 --methods simfbo --seeds 2

The set-up is that of the demo: 100 clients with two shards of labels each, a body of 784 x 200 and a head of
200 x 10. Every method has one point of settings, which was chosen by hand. So this does not compare tuned methods,
as the leaderboard does, but shows what a method can do. A run ends when it first has 90 %. Megabytes are up and
down over all clients. Finished runs are not done again.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

import fedbilevel as fb
from fedbilevel.runtime import prepare_runtime

LOCAL: dict[str, Any] = dict(tau=20, batch_zeta=100, batch_xi=100, alpha=0.3)
SETTINGS: dict[str, dict[str, Any]] = {
    "simfbo": dict(name="simfbo", beta=0.02, momentum=0.5, **LOCAL),
    "shrofbo": dict(name="shrofbo", beta=0.02, momentum=0.5, **LOCAL),
    "fedbio": dict(name="fedbio", beta=0.02, **LOCAL),
    "fedbioacc": dict(name="fedbioacc", beta=0.02, **LOCAL),
    "fedmsa": dict(name="fedmsa", alpha=0.1, beta=0.01, tau=5, batch_zeta=100, batch_xi=100),
    "fedavg joint": dict(name="fedavg", control="joint", beta=0.02, **LOCAL),
    "fedsoba": dict(name="fedsoba", alpha=1.0, beta=0.1, momentum=0.5),
    "fed-f2sa": dict(name="fed-f2sa", alpha=1.0, beta=0.1),
    "fbo-aggitd": dict(name="fbo-aggitd", alpha=0.2, upper_steps=5),
    "naive-itd": dict(name="naive-itd", alpha=0.2, upper_steps=5),
    "fednest": dict(name="fednest", alpha=0.2, upper_steps=5, T=1),  # with T = 5 it diverges
    "lfednest": dict(name="lfednest", alpha=0.01, upper_steps=5, T=1),  # with 0.05 and T = 5 it diverges
}


def reached(settings: dict[str, Any], seed: int, rounds: int, folder: Path) -> dict[str, Any] | None:
    """The last line of the history if the run has 90 %, or None."""
    common = {"seed": seed, "evaluate.every": 1, "stop.rounds": rounds, "stop.accuracy": 0.9}
    values = {f"algorithm.{key}": value for key, value in settings.items()}
    spec = fb.load_spec("demo", common | values)
    try:
        last = fb.run(spec, folder, resume=True).history[-1]
    except fb.Diverged:
        return None
    return last if (last["test_accuracy"] or 0.0) >= 0.9 else None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--methods", nargs="*", default=list(SETTINGS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=600)
    arguments = parser.parse_args()
    prepare_runtime()
    print("| method | reached | rounds | MB | seconds of training |\n|---|---|---|---|---|")
    for name in arguments.methods:
        folders = [arguments.out / f"{name.replace(' ', '-')}-{seed}" for seed in range(arguments.seeds)]
        found = [reached(SETTINGS[name], seed, arguments.rounds, folder) for seed, folder in enumerate(folders)]
        there = [each for each in found if each is not None]
        row = [name, f"{len(there)} of {len(found)}"]
        if there:
            rounds = [each["rounds"] for each in there]
            row.append(f"{np.mean(rounds):.1f} ({', '.join(map(str, rounds))})")
            row.append(f"{np.mean([each['bytes_up'] + each['bytes_down'] for each in there]) / 1e6:,.0f}")
            row.append(f"{np.mean([each['seconds'] for each in there]):.1f}")
        else:
            row += [f"not in {arguments.rounds}", "-", "-"]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
