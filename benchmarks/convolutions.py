"""A gradient of the CNN's body beside PyTorch's, whose convolutions are oneDNN's, on one core each, in turn.

    python benchmarks/convolutions.py [--rows 300] [--repeats 15]

Both compute the gradient of the same loss by the parameters of the body (two convolutions with pooling, and a
dense layer) on the same rows of a client. It prints the processor time of both, the ratio and its quartiles, how
far the gradients are from each other, and where PyTorch's time goes, as its own profiler tells. Processor times of
one core suffer least from what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

KINDS = {"mnist": (28, 28, 1), "cifar10": (32, 32, 3)}
SHOWN = 8  # operations of PyTorch that are shown


def ours(shape: tuple[int, int, int], rows: np.ndarray, weights: np.ndarray) -> tuple[Any, Callable[[], Any]]:
    """The body, and a function that computes the gradient of <weights, features>."""
    import equinox as eqx
    import jax
    import jax.numpy as jnp

    from fedbilevel.models import cnn

    body: Any = cnn(shape, 10, head_layers=2, key=jax.random.key(0)).body
    parameters, rest = eqx.partition(body, eqx.is_inexact_array)

    def loss(p: Any, rows: Any) -> Any:
        return jnp.sum(eqx.combine(p, rest)(rows) * weights)

    gradient, given = jax.jit(jax.grad(loss)), jnp.asarray(rows)
    return body, lambda: jax.block_until_ready(gradient(parameters, given))


def theirs(body: Any, shape: tuple[int, int, int], rows: np.ndarray, weights: np.ndarray) -> Callable[[], Any]:
    """The same gradient by PyTorch, with the same parameters."""
    import torch
    from torch.nn import functional as F

    torch.set_num_threads(1)
    images = torch.from_numpy(rows.reshape(-1, *shape).transpose(0, 3, 1, 2).copy())
    towards = torch.from_numpy(weights)
    padding, parameters, channels = body.convolutions[0].padding, [], shape[2]
    for layer in body.convolutions:
        kernel = np.asarray(layer.kernel).reshape(5, 5, channels, -1).transpose(3, 2, 0, 1).copy()
        parameters += [torch.tensor(kernel, requires_grad=True)]
        parameters += [torch.tensor(np.asarray(layer.bias), requires_grad=True)]
        channels = len(layer.bias)
    dense = body.dense.layers[0]
    parameters += [torch.tensor(np.asarray(a), requires_grad=True) for a in (dense.weight, dense.bias)]

    def gradient() -> Any:
        k1, b1, k2, b2, w, b = parameters
        made = F.relu(F.max_pool2d(F.conv2d(images, k1, b1, padding=padding), 2))
        made = F.relu(F.max_pool2d(F.conv2d(made, k2, b2), 2))
        made = made.permute(0, 2, 3, 1).flatten(1)  # our features are in this order
        return torch.autograd.grad(torch.sum(F.relu(F.linear(made, w, b)) * towards), parameters)

    return gradient


def distance(mine: Any, other: Any) -> float:
    """The distance of two gradients, as a share of the second; kernels are compared by their norms."""
    import jax

    a = np.asarray([np.linalg.norm(leaf) for leaf in jax.tree.leaves(mine)])
    b = np.asarray([float(leaf.norm()) for leaf in other])
    return float(np.max(np.abs(np.sort(a) - np.sort(b)) / np.sort(b)))


def timed(function: Callable[[], Any]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def profiled(function: Callable[[], Any]) -> list[tuple[str, float]]:
    """The shares of PyTorch's operations in its time, the largest first."""
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        function()
    events = [(event.key, event.self_cpu_time_total) for event in profile.key_averages()]
    total = sum(taken for _, taken in events)
    return sorted(((name, taken / total) for name, taken in events), key=lambda each: -each[1])[:SHOWN]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=300)
    parser.add_argument("--repeats", type=int, default=15)
    given = parser.parse_args()
    os.environ.setdefault("JAX_NUM_CPU_DEVICES", "1")
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before either library starts its threads
    from fedbilevel.runtime import keep_memory

    keep_memory()
    rng = np.random.default_rng(0)
    for name, shape in KINDS.items():
        rows = rng.normal(size=(given.rows, int(np.prod(shape)))).astype(np.float32)
        weights = rng.normal(size=(given.rows, 120)).astype(np.float32)
        body, mine = ours(shape, rows, weights)
        other = theirs(body, shape, rows, weights)
        apart = distance(mine(), other())
        for _ in range(3):
            mine(), other()
        pairs = [(timed(mine), timed(other)) for _ in range(given.repeats)]
        ratios = [theirs_s / ours_s for ours_s, theirs_s in pairs]
        low, middle, high = statistics.quantiles(ratios, n=4)
        a, b = (1e3 * statistics.median(each) for each in zip(*pairs, strict=True))
        print(
            f"{name}: ours {a:.1f} ms, PyTorch {b:.1f} ms, PyTorch / ours {middle:.2f} ({low:.2f} to {high:.2f});"
        )
        print(f"  The norms of the gradients differ by {apart:.1e}. Of PyTorch's time:")
        for operation, share in profiled(other):
            print(f"  {share:6.1%}  {operation}")


if __name__ == "__main__":
    main()
