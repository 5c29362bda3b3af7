"""The floor of an outer iteration: the matrix products that it cannot avoid and nothing else, in JAX.

There are three kinds of products. `needs` says how many of each a method has.

    passes of the body          features of all rows, and what takes a gradient by the features to one by x
    products with the head      scores, gradients and Hessian products of all rows, on stored features
    minibatch steps             one after the other, because each of them starts where the last one ended

A pass of the MLP's body is one product, (rows x inputs)(inputs x hidden). A convolution is a product with
patches that are given, since cutting the patches is not counted. Activations, pooling, softmax, sums and the
gathering of rows are not counted either. The products of convolutions have the shapes that are the fastest ones we
know (`models.Convolution`): the four outputs that pooling compares together, in blocks of rows that stay in the
caches. `flop` counts them without the zeros of the larger kernel.

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

from ..models import LeNetBody
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

    They are batched over the clients for the MLP. The CNN's are computed client by client, on every device at the
    same time, as in our own iteration.
    """
    if case.model == "mlp":
        return _of_batches(case, min(case.cohort, LARGEST))
    clients = [_of_client(case, device) for device in jax.local_devices()]
    return lambda: jax.block_until_ready([clients[i % len(clients)]() for i in range(case.cohort)])


def _of_batches(case: Case, clients: int) -> Callable[[], object]:
    """The products of the MLP for so many clients at once. All batches of clients share the operands."""
    key, need = jax.random.key(0), needs(case)
    (layer,) = layers(case)

    def operands(rows: int) -> tuple[Array, Array]:
        return tuple(jax.random.normal(key, (clients, rows, size)) for size in (layer.inner, layer.outer))  # type: ignore[return-value]

    lower, upper = operands(case.lower), operands(case.upper)
    own = jax.random.normal(key, (clients, layer.inner, layer.outer))
    ahead, back = jax.jit(lambda part, w: part[0] @ w), jax.jit(lambda part: part[0].mT @ part[1])
    heads, steps = _head_products(case, clients), _step_products(case, clients)

    def products() -> None:
        for _ in range(case.cohort // clients):
            made = list[object]()
            for part, (forwards, backwards) in ((lower, need.lower), (upper, need.upper)):
                made += [ahead(part, own) for _ in range(forwards)] + [back(part) for _ in range(backwards)]
            jax.block_until_ready((made, heads(), steps()))

    return products


def _of_client(case: Case, device: jax.Device) -> Callable[[], object]:
    """The products of the CNN for one client, on a device."""
    need = needs(case)
    with jax.default_device(device):
        passes = [(_passes(case, case.lower), need.lower), (_passes(case, case.upper), need.upper)]
        heads, steps = _head_products(case, 1), _step_products(case, 1, device)

    def products() -> object:
        made = list[object]()
        for (ahead, back), (forwards, backwards) in passes:
            made += [ahead() for _ in range(forwards)] + [back() for _ in range(backwards)]
        return made, heads(), steps()

    return products


def _passes(case: Case, rows: int) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward and a backward pass of the CNN's body on so many rows.

    The patches of a block are the same in all blocks, so they stay in the caches, as patches do that have just
    been cut. A result is summed up, so that it is not written to memory either.
    """
    key, body = jax.random.key(0), case.network.body
    assert isinstance(body, LeNetBody)
    size = body.block(rows)
    blocks = -(-rows // size)

    def operands(layer: Product) -> tuple[Array, Array, Array]:
        """Patches of a block, and of every block the kernel and the derivative of its outputs."""
        inner, outer, width, turns = layer.inner, layer.outer, layer.places * size, blocks
        if layer.places == 1:  # a dense layer has all rows at once
            width, turns = rows, 1
        else:  # (5 x 5 pixels to an output) becomes (6 x 6 pixels to four outputs)
            inner, outer, width = inner * 36 // 25, 4 * outer, width // 4
        shapes = (inner, width), (turns, outer, inner), (turns, outer, width)
        return tuple(jax.random.normal(key, shape) for shape in shapes)  # type: ignore[return-value]

    def forward(patches: Array, kernels: Array) -> Array:
        return lax.map(lambda kernel: jnp.sum(kernel @ patches, axis=0), kernels)

    def backward(layer: Product, patches: Array, kernels: Array, changes: Array) -> tuple[Array, Array | None]:
        def block(total: Array, each: tuple[Array, Array]) -> tuple[Array, Array | None]:
            kernel, change = each
            by_input = jnp.sum(kernel.T @ change, axis=0) if layer.inner_gradient else None
            return total + patches @ change.T, by_input

        return lax.scan(block, jnp.zeros((patches.shape[0], changes.shape[1])), (kernels, changes))

    given = [(layer, *operands(layer)) for layer in layers(case)]
    ahead = jax.jit(lambda given: [forward(patches, kernels) for patches, kernels, _ in given])
    back = jax.jit(lambda given: [backward(layer, *each) for layer, each in zip(layers(case), given, strict=True)])
    arrays = [tuple(each) for _, *each in given]
    return (lambda: ahead(arrays)), (lambda: back(arrays))


def _head_products(case: Case, clients: int) -> Callable[[], object]:
    """The products of all rows with arrays of the size of the head."""
    key, need = jax.random.key(0), needs(case)
    given = [
        (jax.random.normal(key, (clients, rows, i)), jax.random.normal(key, (count, clients, o, i)))
        for rows, count in ((case.lower, need.head_lower), (case.upper, need.head_upper))
        for i, o in head(case)
    ]
    product = jax.jit(lambda rows, ws: lax.map(lambda w: w @ rows.mT, ws))
    return lambda: [product(rows, ws) for rows, ws in given]


def _step_products(case: Case, clients: int, device: jax.Device | None = None) -> Callable[[], object]:
    """The products of all rounds of minibatch steps, on one device or the clients spread over all of them.

    Every step adds its product to the head, so that the next one has to wait for it.
    """
    devices = jax.local_devices()
    if device is not None or clients % len(devices) != 0:
        devices = [device or devices[0]]
    share, key, rounds = clients // len(devices), jax.random.key(0), needs(case).rounds

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
    return lambda: [run(*each) for _ in range(rounds) for each in given]


def _move(w: Array, rows: Array, products: int) -> Array:
    """w plus a small multiple of (w rowsᵀ) rows ..., with this number of products."""
    made = w
    for turn in range(products):
        made = made @ (rows.mT if turn % 2 == 0 else rows)
    if products % 2:
        made = jnp.sum(made, axis=-1, keepdims=True)
    return w + SMALL * made
