"""One outer iteration of FBO-AggITD against its floor: the matrix products it cannot avoid.

Set-up: the paper's i.i.d. MNIST MLP with τ = 5 (10 of 100 clients, 300 + 300 rows each). The floor is

    features of both halves, once                         2 products
    the two halves of the hypergradient                   2 products
    four more upper steps, a forward and a backward each  8 products

of 300 x 784 x 200 for each of ten clients: 11.3 GFLOP. Both are timed in turn in one run, so that what else the
machine does falls on both; the ratio of the medians is the result. The data are random: time does not depend
on them.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from fedbilevel import AggITD, ClientData, Federation, LazyClients, Simulation
from fedbilevel.data import ClientSize, Part
from fedbilevel.models import mlp
from fedbilevel.problems import representation_problem

CLIENTS, COHORT, ROWS, INPUTS, HIDDEN, TAU = 100, 10, 300, 784, 200, 5


def random_clients() -> LazyClients:
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(CLIENTS, 2, ROWS, INPUTS)).astype(np.float32)
    labels = rng.integers(0, 10, size=(CLIENTS, 2, ROWS)).astype(np.int32)

    def make(client: int) -> ClientData:
        return ClientData(*(Part(inputs[client, half], labels[client, half]) for half in range(2)))

    return LazyClients(CLIENTS, ClientSize(ROWS, ROWS), make)


def floor() -> Callable[[], object]:
    """The twelve products, as batched matrix products in the same library."""
    key = jax.random.key(0)
    lower, upper = jax.random.normal(key, (2, COHORT, ROWS, INPUTS))
    delta = jax.random.normal(key, (COHORT, ROWS, HIDDEN))
    body = jax.random.normal(key, (HIDDEN, INPUTS))
    bodies = jax.random.normal(key, (COHORT, HIDDEN, INPUTS))
    embed = jax.jit(lambda rows, w: jnp.einsum("cnd,hd->cnh", rows, w))
    forward = jax.jit(lambda rows, w: jnp.einsum("cnd,chd->cnh", rows, w))
    backward = jax.jit(lambda d, rows: jnp.einsum("cnh,cnd->chd", d, rows))

    def products() -> object:
        made = [embed(lower, body), embed(upper, body), backward(delta, upper), backward(delta, lower)]
        for _ in range(TAU - 1):
            made += [forward(upper, bodies), backward(delta, upper)]
        return jax.block_until_ready(made)

    return products


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--out", type=Path, help="folder for bench.json")
    options = parser.parse_args()

    problem = representation_problem(mlp(INPUTS, HIDDEN, 10, key=jax.random.key(0)), 0.05, "norm")
    fed = Federation(Simulation(problem, random_clients()))
    method = AggITD(N=1, upper_steps=TAU, participation=COHORT)
    state = method.init(problem)

    def iteration() -> None:
        nonlocal state
        state = jax.block_until_ready(method.step(fed, state))

    products = floor()
    for _ in range(8):  # until every Q was drawn and every program compiled
        iteration()
        products()
    before = {name: account.seconds for name, account in fed.ledger.steps.items()}
    pairs = np.asarray([(seconds(iteration), seconds(products)) for _ in range(options.repeats)])
    ours, bare = np.median(pairs, axis=0)
    ratios = np.percentile(pairs[:, 0] / pairs[:, 1], [25, 75])
    flop = 12 * 2 * COHORT * ROWS * INPUTS * HIDDEN

    table = Table(title=f"One outer iteration, {options.repeats} interleaved repeats", title_justify="left")
    for column in ("", "seconds (median)", "GFLOP/s"):
        table.add_column(column, justify="right" if column else "left")
    table.add_row("our outer iteration", f"{ours:.3f}", f"{flop / ours / 1e9:.0f}")
    table.add_row("the bare matrix products", f"{bare:.3f}", f"{flop / bare / 1e9:.0f}")
    table.add_section()
    for name, account in fed.ledger.steps.items():
        table.add_row(f"  of ours, {name}", f"{(account.seconds - before[name]) / options.repeats:.3f} (mean)")
    console = Console()
    console.print(table)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    console.print(
        f"ratio {ours / bare:.2f} (quartiles of the pairs {ratios[0]:.2f} to {ratios[1]:.2f}); "
        f"peak memory {memory:.0f} MB",
        highlight=False,
    )
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        row = {"case": "mnist-mlp-iid-tau5", "ours_s": ours, "floor_s": bare, "ratio": ours / bare}
        (options.out / "bench.json").write_text(json.dumps([row], indent=2) + "\n")


if __name__ == "__main__":
    main()
