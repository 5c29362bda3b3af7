"""One outer iteration of FBO-AggITD with clients of PyTorch, beside PyTorch loops that are written by hand.

    python benchmarks/torch_clients.py [--case mnist-mlp-iid-tau5] [--times 5]

All of them compute the same iteration on the same rows with one thread: the loop that a PyTorch user would write
first (`torch_loop` of `fedbilevel bench`), the same mathematics batched by torch.func (`torch_func`), our eager
clients (engine "loop"), our batched clients (engine "batched"), the simulation of the same modules converted to
JAX (`TorchProblem(convert=True)`) and that of JAX's own problem. They take turns, so that what else the machine
does meets all of them. The figures are medians of processor seconds and of seconds, and the ratios are medians
over the turns. A case with a CNN has only the two simulations, as the loops are written for the MLP.
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


def problem_of(case: Case, convert: bool = False) -> TorchProblem:
    """The network of the case as modules."""
    body, head = lenet(case) if case.model == "cnn" else mlp(case)
    return TorchProblem(body, head, lower, upper, embed=lambda body, inputs: body(inputs), convert=convert)


def mlp(case: Case) -> tuple[nn.Module, nn.Module]:
    return nn.Sequential(nn.Linear(case.inputs, HIDDEN), nn.ReLU()), nn.Linear(HIDDEN, CLASSES)


def lenet(case: Case) -> tuple[nn.Module, nn.Module]:
    """As `fedbilevel.models.cnn` with two layers in the head, on images whose channels are the first axis."""
    side, _, channels = case.shape

    def part(before: int, after: int, padding: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 5, padding=padding), nn.MaxPool2d(2), nn.ReLU()]

    convolutions = [*part(channels, 6, 2 if side == 28 else 0), *part(6, 16, 0), nn.Flatten()]
    body = nn.Sequential(nn.Unflatten(1, (channels, side, side)), *convolutions, nn.Linear(400, 120), nn.ReLU())
    return body, nn.Sequential(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, CLASSES))


def ours(case: Case, problem: fb.BilevelProblem, engine: Callable) -> Callable[[], None]:
    """A function that performs one outer iteration in each call."""
    fed = fb.Federation(engine(problem, case.clients()))
    algorithm, state = case.algorithm, [case.algorithm.init(problem, case.registered)]

    def iterate() -> None:
        state[0] = algorithm.step(fed, state[0])
        state[0].x.block_until_ready()

    return iterate


def simulated(problem: fb.BilevelProblem, clients: fb.Clients) -> fb.Simulation:
    return fb.Simulation(problem, clients, devices=1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--case", default=STANDARD)
    parser.add_argument("--times", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    case = CASES[given.case]
    made: dict[str, Callable[[], None]] = {}
    if case.model == "mlp":
        made |= {
            "hand-written loop": torch_loop(case),
            "eager (loop)": ours(case, problem_of(case), fb.Loop),
            "torch.func": torch_func(case),
            "batched": ours(case, problem_of(case), lambda p, c: p.batched(c, 1024)),
        }
    made |= {
        "converted": ours(case, problem_of(case, convert=True), simulated),
        "JAX simulation": ours(case, case.problem, simulated),
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
    pairs = ("eager (loop)", "hand-written loop"), ("batched", "torch.func"), ("converted", "JAX simulation")
    for name, other in (pair for pair in pairs if pair[0] in made):
        ratios = [a / b for a, b in zip(busy[name], busy[other], strict=True)]
        print(f"  {name} / {other}: {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})")


if __name__ == "__main__":
    main()
