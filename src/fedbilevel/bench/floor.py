"""The floor of an outer iteration: the matrix products that it cannot avoid and nothing else, in JAX.

There are three kinds of products. `needs` says how many of each a method has.

    passes of the body          features of all rows, and what takes a gradient by the features to one by x
    products with the head      scores, gradients and Hessian products of all rows, on stored features
    minibatch steps             one after the other, because each of them starts where the last one ended

A pass of the MLP's body is one product, (rows x inputs)(inputs x hidden). A convolution is a product with
patches that are given, since cutting the patches is not counted. Activations, pooling, softmax, sums and the
gathering of rows are not counted either.

For FBO-AggITD the passes of every client of the cohort are

    features of both halves, once                           2 forward passes of the body
    the two halves of the hypergradient                     2 backward passes
    tau - 1 more upper steps (the first one is free)        a forward and a backward pass each

A minibatch step of SVRG needs two products with a head of one layer, the scores at v and the difference of the
gradients, because the scores at the anchor are the same in all steps of a round (see `heads.py`). With the CNN's
head of two layers it needs five at v and three at the anchor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from .cases import BATCH, CLASSES, HIDDEN, Case

LARGEST = 100  # the number of clients whose operands are held at once
SMALL = 1e-3  # the size of a step, so that the numbers stay finite


class Product(NamedTuple):
    """The product of one layer for each row: (places x inner)(inner x outer).

    `inner_gradient` says whether the backward pass also needs the gradient of the layer's input.
    """

    places: int
    inner: int
    outer: int
    inner_gradient: bool


class Needs(NamedTuple):
    """What one client computes in an outer iteration.

    lower, upper    passes of the body on the rows of that half, as pairs of forward and backward passes
    head_lower, head_upper   products of all rows with an array of the size of the head
    rounds          rounds of minibatch steps; their first step is free
    """

    lower: tuple[int, int]
    upper: tuple[int, int]
    head_lower: int
    head_upper: int
    rounds: int


def needs(case: Case) -> Needs:
    """The counts for the method of a case.

    At one y, the scores are computed once for all derivatives. A gradient is then one product with the head, a
    Hessian product two, a mixed derivative three, and the gradient by the features one. FBO-AggITD has N/2 Hessian
    products on average.
    """
    N, tau, T = case.N, case.tau, case.terms
    gradients = 2 * N  # the gradient q of each lower round
    upper_steps = 2 * (tau - 1)  # scores, and the gradient by the features
    if case.method == "fednest":  # a Hessian loop of T products at y^N
        return Needs((1, 1), (tau, tau), gradients + 1 + 2 * T + 3, 3 + upper_steps, N)
    if case.method == "lfednest":  # a hypergradient of the client's own in every upper step
        return Needs((tau, tau), (tau, tau), gradients + tau * (1 + 2 * T + 3), 3 * tau, N)
    if case.method == "naive-itd":  # a backward loop with a mixed derivative in each of its N rounds
        return Needs((1, N), (tau, tau), gradients + N * (1 + 2 + 3) - 2, 3 + upper_steps, N)
    if case.method == "ma-dsbo":  # T gradients on all rows, and T - 1 products; one step on x
        return Needs((1, 1), (1, 1), 2 * T + 1 + 2 * (T - 1) + 3, 3, 0)
    return Needs((1, 1), (tau, tau), gradients + 1 + 2 * ((N + 1) // 2) + 3, 3 + upper_steps, N)


def layers(case: Case) -> list[Product]:
    """The layers of the body."""
    if case.model == "mlp":
        return [Product(1, case.inputs, HIDDEN, False)]
    side, channels = case.shape[0], case.shape[2]
    first = side if side == 28 else side - 4
    return [
        Product(first * first, 25 * channels, 6, False),
        Product(100, 150, 16, True),
        Product(1, 400, 120, True),
    ]


def head(case: Case) -> list[tuple[int, int]]:
    """The layers of the head, as numbers of inputs and outputs."""
    return [(HIDDEN, CLASSES)] if case.model == "mlp" else [(120, 84), (84, CLASSES)]


def step_products(case: Case) -> list[int]:
    """How often a minibatch step needs a product of the size of each layer of the head."""
    return [2] if case.model == "mlp" else [3, 5]


def flop(case: Case) -> int:
    """Return the number of floating-point operations of the floor."""
    forward = sum(2 * layer.places * layer.inner * layer.outer for layer in layers(case))
    inputs = sum(2 * layer.places * layer.inner * layer.outer for layer in layers(case) if layer.inner_gradient)
    need = needs(case)
    passes = sum(
        rows * (ahead * forward + back * (forward + inputs))
        for rows, (ahead, back) in ((case.lower, need.lower), (case.upper, need.upper))
    )
    sizes = [2 * inner * outer for inner, outer in head(case)]
    with_head = (need.head_lower * case.lower + need.head_upper * case.upper) * sum(sizes)
    step = BATCH * sum(count * size for count, size in zip(step_products(case), sizes, strict=True))
    return case.cohort * (passes + with_head + need.rounds * (case.steps - 1) * step)


def floor(case: Case) -> Callable[[], object]:
    """Return a function that computes the products of one outer iteration.

    They are batched over the clients for the MLP and computed client by client for the CNN. Each model uses the
    faster of the two orientations, which is rows x features for the MLP and features x places for the CNN. All
    chunks share the operands, and for the CNN all clients share them. Minibatch steps are batched over the clients
    of a device, on every device at the same time, as in our own iteration.
    """
    wide = case.model == "cnn"
    clients = 1 if wide else min(case.cohort, LARGEST)
    key, need = jax.random.key(0), needs(case)

    def operand(rows: int, features: int) -> Array:
        return jax.random.normal(key, (features, rows) if wide else (clients, rows, features))

    def operands(rows: int) -> list[tuple[Array, Array]]:
        return [
            (operand(rows * layer.places, layer.inner), operand(rows * layer.places, layer.outer))
            for layer in layers(case)
        ]

    def forward(a: list[tuple[Array, Array]], ws: list[Array]) -> list[Array]:
        return [w @ rows if wide else rows @ w for (rows, _), w in zip(a, ws, strict=True)]

    def backward(a: list[tuple[Array, Array]], ws: list[Array]) -> list[Array]:
        made = [rows @ d.T if wide else rows.mT @ d for rows, d in a]
        wanted = [(d, w) for (_, d), w, layer in zip(a, ws, layers(case), strict=True) if layer.inner_gradient]
        return made + [w.T @ d if wide else d @ w.mT for d, w in wanted]

    lower, upper = operands(case.lower), operands(case.upper)
    own = [operand(layer.inner, layer.outer) for layer in layers(case)]
    ahead, back = jax.jit(forward), jax.jit(backward)
    small = jax.jit(lambda rows, ws: lax.map(lambda w: w @ rows.mT, ws))
    heads = [
        (jax.random.normal(key, (clients, rows, i)), jax.random.normal(key, (count, clients, o, i)))
        for rows, count in ((case.lower, need.head_lower), (case.upper, need.head_upper))
        for i, o in head(case)
    ]
    steps = minibatch_steps(case, clients) if need.rounds else None

    def products() -> None:
        for _ in range(case.cohort // clients):
            made = list[object]()
            for part, (forwards, backwards) in ((lower, need.lower), (upper, need.upper)):
                made += [ahead(part, own) for _ in range(forwards)] + [back(part, own) for _ in range(backwards)]
            made += [small(rows, ws) for rows, ws in heads]
            if steps is not None:
                made += [steps() for _ in range(need.rounds)]
            jax.block_until_ready(made)

    return products


def minibatch_steps(case: Case, clients: int) -> Callable[[], list[Array]]:
    """Return a function that computes the products of a round of minibatch steps.

    Every step adds its product to the head, so that the next one has to wait for it.
    """
    devices = jax.local_devices() if clients % len(jax.local_devices()) == 0 else jax.local_devices()[:1]
    share, key = clients // len(devices), jax.random.key(0)

    def put(device: jax.Device) -> tuple[tuple[Array, ...], tuple[Array, ...]]:
        starts = tuple(jax.random.normal(key, (share, o, i)) for i, o in head(case))
        rows = tuple(jax.random.normal(key, (case.steps - 1, share, BATCH, i)) / i for i, _ in head(case))
        return jax.device_put((starts, rows), device)

    @jax.jit
    def run(starts: tuple[Array, ...], rows: tuple[Array, ...]) -> tuple[Array, ...]:
        def step(ws: tuple[Array, ...], batch: tuple[Array, ...]) -> tuple[tuple[Array, ...], None]:
            return tuple(_move(w, f, n) for w, f, n in zip(ws, batch, step_products(case), strict=True)), None

        return lax.scan(step, starts, rows)[0]

    given = [put(device) for device in devices]
    return lambda: jax.tree.leaves([run(*each) for each in given])


def _move(w: Array, rows: Array, products: int) -> Array:
    """w plus a small multiple of (w rowsᵀ) rows ..., with this number of products."""
    made = w
    for turn in range(products):
        made = made @ (rows.mT if turn % 2 == 0 else rows)
    if products % 2:
        made = jnp.sum(made, axis=-1, keepdims=True)
    return w + SMALL * made
