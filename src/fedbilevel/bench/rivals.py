"""What the PyTorch rivals share: the state, the random choices of an outer iteration, data and layouts.

A rival is a function iterate(state, plan) -> state that performs one outer iteration of FBO-AggITD (`sampled`
estimator, `svrg` lower solver). The plan contains every random choice, so a test can pass the choices that our own
iteration made. `rivals_loop.torch_loop` is the sequential rival, and `rivals_func.torch_func` is the batched one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .cases import BATCH, CLASSES, EPOCHS, HIDDEN, Case

Group = tuple[Tensor, ...]


class State(NamedTuple):
    """x and y as PyTorch stores them: weight and bias of each layer, and kernels as (out, in, 5, 5)."""

    body: Group
    head: Group


class Plan(NamedTuple):
    """The random choices of one outer iteration.

    `index` contains the minibatches of the lower steps and has the shape (N, cohort, steps, BATCH). Step s uses
    only the first `counts[s]` rows, since the last minibatch of a pass may be short.
    """

    clients: tuple[int, ...]
    index: Tensor
    counts: tuple[int, ...]
    Q: int


class Rows(NamedTuple):
    """A part of a client's data, or of a cohort's if stacked. Images are (rows, channels, height, width)."""

    inputs: Tensor
    labels: Tensor


Iterate = Callable[[State, Plan], State]


@dataclass
class Rival:
    """A callable that draws a new plan, calls `iterate` with it, and keeps the state for the next call."""

    case: Case
    iterate: Iterate
    state: State
    generator: torch.Generator

    def __call__(self) -> None:
        self.state = self.iterate(self.state, draw_plan(self.case, self.generator))


def rival(case: Case, iterate: Iterate) -> Rival:
    """Return a rival that starts from the same x and y as our run of the case."""
    problem = case.problem
    start = state_from(case, np.asarray(problem.flat_x.vector), np.asarray(problem.flat_y.vector))
    return Rival(case, iterate, start, torch.Generator().manual_seed(0))


def draw_plan(case: Case, generator: torch.Generator) -> Plan:
    """Draw a cohort, EPOCHS shuffled passes for each client and lower round, and Q uniformly from {0, ..., N}."""
    clients = torch.randperm(case.registered, generator=generator)[: case.cohort].tolist()
    index = torch.zeros(case.N * case.cohort * EPOCHS, -(-case.lower // BATCH) * BATCH, dtype=torch.int64)
    for order in index:
        order[: case.lower] = torch.randperm(case.lower, generator=generator)
    Q = int(torch.randint(case.N + 1, (), generator=generator))
    return Plan(tuple(clients), index.view(case.N, case.cohort, case.steps, BATCH), counts(case), Q)


def counts(case: Case) -> tuple[int, ...]:
    """Return the number of rows of each minibatch in a lower round of a client."""
    return EPOCHS * tuple(min(BATCH, case.lower - start) for start in range(0, case.lower, BATCH))


def loader(case: Case) -> Callable[[int], tuple[Rows, Rows]]:
    """Return load(client) -> (lower rows, upper rows). Inputs are views of the arrays in memory and not copies."""
    clients = case.clients()

    def load(client: int) -> tuple[Rows, Rows]:
        lower, upper = (
            Rows(_inputs(case, torch.from_numpy(part.inputs)), torch.from_numpy(part.targets).long())
            for part in clients.load(client)[:2]
        )
        return lower, upper

    return load


def _inputs(case: Case, flat: Tensor) -> Tensor:
    """Reshape our rows, which are flat in the order height, width, channels, to what PyTorch expects."""
    return flat if case.model == "mlp" else flat.unflatten(1, case.shape).permute(0, 3, 1, 2)


def padding(case: Case) -> int:
    """Return the padding of the first convolution, which pads images of 28 x 28 to 32 x 32."""
    return 2 if case.shape[0] == 28 else 0


class Layer(NamedTuple):
    """The shape of a weight in PyTorch and, where the layouts differ, our shape and the order of its axes."""

    shape: tuple[int, ...]
    ours: tuple[int, ...] | None = None
    order: tuple[int, ...] = ()


def layers(case: Case) -> tuple[tuple[Layer, ...], tuple[Layer, ...]]:
    """Return the layers of body and head. Our kernels are (5, 5, in, out), and our images channels last."""
    if case.model == "mlp":
        return (Layer((HIDDEN, case.inputs)),), (Layer((CLASSES, HIDDEN)),)
    channels = case.shape[2]
    return (
        Layer((6, channels, 5, 5), (5, 5, channels, 6), (3, 2, 0, 1)),
        Layer((16, 6, 5, 5), (5, 5, 6, 16), (3, 2, 0, 1)),
        Layer((120, 400), (120, 5, 5, 16), (0, 3, 1, 2)),
    ), (Layer((84, 120)), Layer((CLASSES, 84)))


def state_from(case: Case, x: np.ndarray, y: np.ndarray) -> State:
    """Convert our flat vectors to the state of a rival."""
    halves = []
    for vector, half in zip((x, y), layers(case), strict=True):
        left, group = torch.from_numpy(np.array(vector)), []
        for shape, ours, order in half:
            weight, bias, left = left.split([size := int(np.prod(shape)), shape[0], len(left) - size - shape[0]])
            if ours is not None:
                weight = weight.view(ours).permute(order)
            group += [weight.reshape(shape).contiguous(), bias.clone()]
        halves.append(tuple(group))
    return State(*halves)


def flat_from(case: Case, state: State) -> tuple[np.ndarray, np.ndarray]:
    """Convert the state of a rival to our flat vectors x and y."""
    vectors = []
    for group, half in zip(state, layers(case), strict=True):
        flat = []
        for weight, bias, (_, ours, order) in zip(group[::2], group[1::2], half, strict=True):
            if ours is not None:
                weight = weight.reshape([ours[i] for i in order]).permute(np.argsort(order).tolist())
            flat += [weight.reshape(-1), bias]
        vectors.append(torch.cat(flat).numpy())
    return vectors[0], vectors[1]


def mean(replies: Iterable[Sequence[Tensor]], count: int) -> Group:
    """Return the mean over clients of lists of tensors. Replies are added one by one and are not kept."""
    total: Group | None = None
    for reply in replies:
        if total is None:
            total = tuple(torch.zeros_like(v) for v in reply)
        for sum_, value in zip(total, reply, strict=True):
            sum_.add_(value, alpha=1 / count)
    assert total is not None  # a cohort is never empty
    return total
