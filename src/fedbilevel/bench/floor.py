"""The floor of an outer iteration: the matrix products that it cannot avoid and nothing else, in JAX.

For every client of the cohort these are

    features of both halves, once                           2 forward passes of the body
    the two halves of the hypergradient                     2 backward passes
    tau - 1 more upper steps (the first one is free)        a forward and a backward pass each

A pass of the MLP's body is one product, (rows x inputs)(inputs x hidden). A convolution is a product with
patches that are given, since cutting the patches is not counted. Work on the small features (lower steps,
Hessian products) is not counted either, and neither are activations, pooling and sums.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jax import Array

from .cases import HIDDEN, Case

LARGEST = 100  # the number of clients whose operands are held at once


class Product(NamedTuple):
    """The product of one layer for each row: (places x inner)(inner x outer).

    `inner_gradient` says whether the backward pass also needs the gradient of the layer's input.
    """

    places: int
    inner: int
    outer: int
    inner_gradient: bool


def layers(case: Case) -> list[Product]:
    if case.model == "mlp":
        return [Product(1, case.inputs, HIDDEN, False)]
    side, channels = case.shape[0], case.shape[2]
    first = side if side == 28 else side - 4
    return [
        Product(first * first, 25 * channels, 6, False),
        Product(100, 150, 16, True),
        Product(1, 400, 120, True),
    ]


def flop(case: Case) -> int:
    """Return the number of floating-point operations of the floor."""
    forward = sum(2 * layer.places * layer.inner * layer.outer for layer in layers(case))
    inputs = sum(2 * layer.places * layer.inner * layer.outer for layer in layers(case) if layer.inner_gradient)
    passes = case.lower + case.upper + case.upper * (case.tau - 1)  # the rows that pass forward and backward
    return case.cohort * passes * (2 * forward + inputs)


def floor(case: Case) -> Callable[[], object]:
    """Return a function that computes the products of one outer iteration.

    They are batched over the clients for the MLP and computed client by client for the CNN. Each model uses the
    faster of the two orientations, which is rows x features for the MLP and features x places for the CNN. All
    chunks share the operands, and for the CNN all clients share them.
    """
    wide = case.model == "cnn"
    clients = 1 if wide else min(case.cohort, LARGEST)
    key = jax.random.key(0)

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

    def products() -> None:
        for _ in range(case.cohort // clients):
            made = [ahead(lower, own), ahead(upper, own), back(upper, own), back(lower, own)]
            for _ in range(case.tau - 1):
                made += [ahead(upper, own), back(upper, own)]
            jax.block_until_ready(made)

    return products
