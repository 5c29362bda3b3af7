"""Models in two halves: the body is the upper variable, the head the lower one.

Convolutions are written as a matrix times patches. After local steps each client has its own kernel, and then this
is several times faster on a CPU than `lax.conv`; on other devices the compiler sees plain matrix products. Inside
the convolutional part the rows of the batch are the last axis. Shifts, activations and pooling then run along
contiguous memory, and the products are wide instead of tall, which is several times faster again.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from .errors import SettingsError

ModelName = Literal["mlp", "cnn"]
Shape = tuple[int, int, int]
NOBODY = 4  # the winner of a square without a positive place
BLOCK = 1_300_000  # numbers in the patches made at once; these stay in the caches, which is twice as fast
LANES = 16  # the number of rows side by side in a vector register


class TwoHalves(NamedTuple):
    """A network cut in two: features = body(rows), scores = head(features), both on a batch of rows."""

    body: eqx.Module
    head: eqx.Module


class Dense(eqx.Module):
    """Fully connected layers with ReLU between them, and after the last one if `activate_last`."""

    layers: tuple[eqx.nn.Linear, ...]
    activate_last: bool = eqx.field(static=True)

    def __init__(self, sizes: tuple[int, ...], *, activate_last: bool, key: Array) -> None:
        keys = jax.random.split(key, len(sizes) - 1)
        self.layers = tuple(
            eqx.nn.Linear(a, b, key=k) for a, b, k in zip(sizes[:-1], sizes[1:], keys, strict=True)
        )
        self.activate_last = activate_last

    def __call__(self, rows: Array) -> Array:
        for i, layer in enumerate(self.layers):
            rows = jax.vmap(layer)(rows)
            if self.activate_last or i < len(self.layers) - 1:
                rows = jax.nn.relu(rows)
        return rows


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def convolve(kernel: Array, images: Array, side: int) -> Array:
    """A square convolution of (channels, height, width, rows) without padding.

    The kernel is (side * side * channels in, channels out). The derivative is written out, because JAX transposes
    the cutting of patches to a sum of padded copies, which is four times slower than adding into place.
    """
    _, height, width, rows = images.shape
    out = lax.optimization_barrier(kernel.T) @ _patches(images, side)  # folding the transpose would be slow
    return out.reshape(-1, height - side + 1, width - side + 1, rows)


def _forward(kernel: Array, images: Array, side: int) -> tuple[Array, tuple[Array, Array]]:
    return convolve(kernel, images, side), (kernel, images)


def _backward(side: int, stored: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
    kernel, images = stored
    flat = out.reshape(out.shape[0], -1)
    return _patches(images, side) @ flat.T, _paste(kernel @ flat, images, side)


convolve.defvjp(_forward, _backward)


def _places(images: Array, side: int) -> Iterator[tuple[slice, slice, slice]]:
    """The part of the images that each entry of a kernel is multiplied with."""
    height, width = images.shape[1] - side + 1, images.shape[2] - side + 1
    for i, j in itertools.product(range(side), repeat=2):
        yield slice(None), slice(i, i + height), slice(j, j + width)


def _patches(images: Array, side: int) -> Array:
    """(side * side * channels, height * width * rows)"""
    shifted = [images[place] for place in _places(images, side)]
    return jnp.concatenate(shifted).reshape(side * side * images.shape[0], -1)


def _paste(patches: Array, like: Array, side: int) -> Array:
    """The transpose of `_patches`."""
    out = jnp.zeros_like(like)
    places = list(_places(like, side))
    for place, patch in zip(places, patches.reshape(len(places), *like[places[0]].shape), strict=True):
        out = out.at[place].add(patch)
    return out


@jax.custom_vjp
def pool(images: Array) -> Array:
    """The largest of every 2 x 2 pixels of (channels, height, width, rows), or zero if it is negative.

    Its derivative keeps one byte for each result, the place of the largest pixel. JAX's own derivative would keep
    copies of the input.
    """
    return _pool(images)[0]


def _pool(images: Array) -> tuple[Array, Array]:
    c, h, w, n = images.shape
    squares = images.reshape(c, h // 2, 2, w // 2, 2, n)
    four = [squares[:, :, i, :, j] for i, j in itertools.product(range(2), repeat=2)]
    best = jnp.maximum(jnp.maximum(four[0], four[1]), jnp.maximum(four[2], four[3]))
    winner = jnp.select([best <= 0, *(best == one for one in four[:3])], [NOBODY, 0, 1, 2], 3)
    return jnp.maximum(best, 0.0), winner.astype(jnp.uint8)


def _unpool(winner: Array, out: Array) -> tuple[Array]:
    c, h, w, n = out.shape
    four = jnp.stack([jnp.where(winner == place, out, 0.0) for place in range(4)])
    return (four.reshape(2, 2, c, h, w, n).transpose(2, 3, 0, 4, 1, 5).reshape(c, 2 * h, 2 * w, n),)


pool.defvjp(_pool, _unpool)


class Convolution(eqx.Module):
    """A square convolution on (channels, height, width, rows), then 2 x 2 max pooling and ReLU."""

    kernel: Array  # (side * side * channels in, channels out)
    bias: Array
    side: int = eqx.field(static=True)
    padding: int = eqx.field(static=True)

    def __init__(self, channels: tuple[int, int], side: int, padding: int, *, key: Array) -> None:
        bound = 1 / math.sqrt(side * side * channels[0])
        k, b = jax.random.split(key)
        self.kernel = jax.random.uniform(k, (side * side * channels[0], channels[1]), minval=-bound, maxval=bound)
        self.bias = jax.random.uniform(b, (channels[1],), minval=-bound, maxval=bound)
        self.side, self.padding = side, padding

    def __call__(self, images: Array) -> Array:
        p = self.padding
        out = convolve(self.kernel, jnp.pad(images, ((0, 0), (p, p), (p, p), (0, 0))), self.side)
        return pool(out + self.bias[:, None, None, None])


class LeNetBody(eqx.Module):
    """Two convolutions and fully connected layers, on flat rows of an image's pixels."""

    convolutions: tuple[Convolution, Convolution]
    dense: Dense
    shape: Shape = eqx.field(static=True)

    def __init__(self, shape: Shape, dense: tuple[int, ...], *, key: Array) -> None:
        first, second, last = jax.random.split(key, 3)
        padding = {28: 2, 32: 0}.get(shape[0])
        if padding is None or shape[0] != shape[1]:
            raise SettingsError(
                "problem.model = 'cnn' is wrong: it takes images of 28 x 28 or 32 x 32, "
                f"not {shape[0]} x {shape[1]}; use mlp"
            )
        self.convolutions = (
            Convolution((shape[2], 6), 5, padding, key=first),
            Convolution((6, 16), 5, 0, key=second),
        )
        self.dense = Dense((400, *dense), activate_last=True, key=last)
        self.shape = shape

    def __call__(self, rows: Array) -> Array:
        patch = self.convolutions[0].kernel.shape[0] * self.shape[0] * self.shape[1]
        return self.dense(_in_blocks(self._convolve, rows, max(1, BLOCK // patch // LANES) * LANES))

    def _convolve(self, rows: Array) -> Array:
        images = rows.reshape(rows.shape[0], *self.shape).transpose(3, 1, 2, 0)
        for convolution in self.convolutions:
            images = convolution(images)
        return images.transpose(3, 1, 2, 0).reshape(rows.shape[0], -1)


def _in_blocks(function: Callable[[Array], Array], rows: Array, most: int) -> Array:
    """function(rows), block by block. The size of a block is a multiple of LANES, and zeros fill the last one."""
    count = -(-rows.shape[0] // most)
    if count == 1:
        return function(rows)
    size = -(-rows.shape[0] // (count * LANES)) * LANES
    padded = jnp.pad(rows, ((0, count * size - rows.shape[0]), (0, 0)))
    made = lax.map(function, padded.reshape(count, size, -1))
    return made.reshape(count * size, -1)[: rows.shape[0]]


def mlp(inputs: int, hidden: int, classes: int, *, key: Array) -> TwoHalves:
    """A network inputs-hidden-classes with ReLU. In 784-200-10 the body has 157,000 parameters, the head 2,010."""
    body, head = jax.random.split(key)
    return TwoHalves(
        Dense((inputs, hidden), activate_last=True, key=body),
        Dense((hidden, classes), activate_last=False, key=head),
    )


def cnn(shape: Shape, classes: int, *, head_layers: int, key: Array) -> TwoHalves:
    """LeNet: conv 6 (5 x 5), pool, conv 16 (5 x 5), pool, 400-120-84-classes; the head has the last 1 or 2 layers.

    Images of 28 x 28 are padded by 2 in the first convolution.
    """
    sizes = (120, 84, classes)
    body, head = jax.random.split(key)
    return TwoHalves(
        LeNetBody(shape, sizes[: 3 - head_layers], key=body),
        Dense(sizes[2 - head_layers :], activate_last=False, key=head),
    )
