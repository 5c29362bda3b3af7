"""One outer iteration of FBO-AggITD with clients of PyTorch, beside PyTorch loops that are written by hand.

    python benchmarks/torch_clients.py [--case mnist-mlp-iid-tau5] [--times 5]

All of them compute the same iteration on the same rows with one thread: the loop that a PyTorch user would write
first (`torch_loop` of `fedbilevel bench`), the same mathematics batched by torch.func (`torch_func`), our eager
clients (engine "loop"), our batched clients (engine "batched") and JAX's simulation. They take turns, so that what
else the machine does meets all of them. The figures are medians of processor seconds and of seconds, and the
ratios are medians over the turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"

import torch
from torch import nn
from torch.nn import functional as F

import fedbilevel as fb
from fedbilevel.bench.cases import CASES, CLASSES, DECAY, HIDDEN, SMOOTHING, STANDARD, Case
from fedbilevel.bench.rivals_func import torch_func
from fedbilevel.bench.rivals_loop import torch_loop
from fedbilevel.runtime import peak_memory
from fedbilevel.torch import TorchProblem


def lower(body: nn.Module, head: nn.Module, rows) -> torch.Tensor:
    penalty = sum(((w**2).sum() + SMOOTHING**2).sqrt() for w in head.parameters())
    return F.cross_entropy(head(rows.features), rows.targets) + DECAY * penalty


def upper(body: nn.Module, head: nn.Module, rows) -> torch.Tensor:
    return F.cross_entropy(head(rows.features), rows.targets)


def problem_of(case: Case) -> TorchProblem:
    """The network of the case as modules."""
    body, head = nn.Sequential(nn.Linear(case.inputs, HIDDEN), nn.ReLU()), nn.Linear(HIDDEN, CLASSES)
    return TorchProblem(body, head, lower, upper, embed=lambda body, inputs: body(inputs))


def ours(case: Case, problem: fb.BilevelProblem, engine: Callable) -> Callable[[], None]:
    """A function that performs one outer iteration in each call."""
    fed = fb.Federation(engine(problem, case.clients()))
    algorithm, state = case.algorithm, [case.algorithm.init(problem, case.registered)]

    def iterate() -> None:
        state[0] = algorithm.step(fed, state[0])
        state[0].x.block_until_ready()

    return iterate


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default=STANDARD)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    case = CASES[given.case]
    made = {
        "hand-written loop": torch_loop(case),
        "eager (loop)": ours(case, problem_of(case), fb.Loop),
        "torch.func": torch_func(case),
        "batched": ours(case, problem_of(case), lambda p, c: p.batched(c, 1024)),
        "JAX simulation": ours(case, case.problem, lambda p, c: fb.Simulation(p, c, devices=1)),
    }
    for iterate in made.values():
        iterate()
    busy: dict[str, list[float]] = {name: [] for name in made}
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(given.times):
        for name, iterate in made.items():
            start, begun = time.process_time(), time.perf_counter()
            iterate()
            busy[name].append(time.process_time() - start)
            taken[name].append(time.perf_counter() - begun)
    print(f"{case.name}: one outer iteration, median of {given.times} turns; peak memory {peak_memory()} MB")
    for name in made:
        own, all_ = statistics.median(busy[name]), statistics.median(taken[name])
        print(f"  {name:18} {own:7.3f} processor s {all_:7.3f} s")
    for name, other in (("eager (loop)", "hand-written loop"), ("batched", "torch.func")):
        ratios = [a / b for a, b in zip(busy[name], busy[other], strict=True)]
        print(f"  {name} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
