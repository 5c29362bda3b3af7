"""Models in two halves: the body is the upper variable, the head the lower one.

Convolutions are written as a matrix times patches. After local steps each client has its own kernel, and then this
is several times faster on a CPU than `lax.conv`; on other devices the compiler sees plain matrix products. Inside
the convolutional part the rows of the batch are the last axis. Shifts, activations and pooling then run along
contiguous memory, and the products are wide instead of tall, which is several times faster again. The outputs that
pooling compares are computed by one product, which is faster again (see `Convolution`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array, lax

from .errors import SettingsError

ModelName = Literal["mlp", "cnn"]
Shape = tuple[int, int, int]
NOBODY = 4  # the winner of a square without a positive place
BLOCK = 250_000  # numbers in the patches made at once; these stay in the caches, which is up to twice as fast
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
def convolve(kernel: Array, images: Array, taps: int) -> Array:
    """A square convolution of (channels, height, width, rows) without padding, as (channels out, places * rows).

    The kernel is (taps * taps * channels in, channels out). The derivative is written out, because JAX transposes
    the cutting of patches to a sum of padded copies, which is slower than adding into place.
    """
    return lax.optimization_barrier(kernel.T) @ _patches(images, taps)  # folding the transpose would be slow


def _forward(kernel: Array, images: Array, taps: int) -> tuple[Array, tuple[Array, Array]]:
    return convolve(kernel, images, taps), (kernel, images)


def _backward(taps: int, stored: tuple[Array, Array], out: Array) -> tuple[Array, Array]:
    kernel, images = stored
    return _patches(images, taps) @ out.T, _paste(kernel @ out, images, taps)


convolve.defvjp(_forward, _backward)


def _places(images: Array, taps: int) -> Iterator[tuple[slice, slice, slice]]:
    """The part of the images that each entry of a kernel is multiplied with."""
    height, width = images.shape[1] - taps + 1, images.shape[2] - taps + 1
    for i, j in itertools.product(range(taps), repeat=2):
        yield slice(None), slice(i, i + height), slice(j, j + width)


def _patches(images: Array, taps: int) -> Array:
    """(taps * taps * channels, places * rows)"""
    shifted = [images[place] for place in _places(images, taps)]
    return jnp.concatenate(shifted).reshape(taps * taps * images.shape[0], -1)


def _paste(patches: Array, like: Array, taps: int) -> Array:
    """The transpose of `_patches`."""
    out = jnp.zeros_like(like)
    places = list(_places(like, taps))
    for place, patch in zip(places, patches.reshape(len(places), *like[places[0]].shape), strict=True):
        out = out.at[place].add(patch)
    return out


@jax.custom_vjp
def pool(four: Array, bias: Array) -> Array:
    """The largest of four numbers plus the bias, or zero if that is negative.

    The four numbers of a result are at the same channel and place of (4 * channels, places). The derivative keeps
    one byte for each result, which says which number is the largest. JAX's own would keep copies of the input.
    """
    return _pool(four, bias)[0]


def _pool(four: Array, bias: Array) -> tuple[Array, Array]:
    each = four.reshape(4, len(bias), -1)
    best = jnp.maximum(jnp.maximum(each[0], each[1]), jnp.maximum(each[2], each[3]))
    out = best + bias[:, None]
    winner = jnp.select([out <= 0, *(best == one for one in each[:3])], [NOBODY, 0, 1, 2], 3)
    return jnp.maximum(out, 0.0), winner.astype(jnp.uint8)


def _unpool(winner: Array, out: Array) -> tuple[Array, Array]:
    four = jnp.where(winner == jnp.arange(4, dtype=jnp.uint8)[:, None, None], out, 0.0)
    return four.reshape(-1, out.shape[1]), jnp.sum(jnp.where(winner == NOBODY, 0.0, out), 1)


pool.defvjp(_pool, _unpool)


class Convolution(eqx.Module):
    """A square convolution on (channels, height, width, rows), then 2 x 2 max pooling and ReLU.

    The four outputs that are pooled are computed together. For that, the four pixels of every square of 2 x 2
    become channels, and the kernel becomes a larger one from squares of pixels to squares of outputs, with zeros
    where a pixel does not reach an output. For a side of 5 that is 1.44 times as much arithmetic, but in products
    of sizes at which they run up to 2.5 times as fast. The patches have 2.8 times fewer numbers, and pooling takes
    the largest of four rows of a product.
    """

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
        height, width = (self._pooled(size) for size in images.shape[1:3])
        out = convolve(self._of_squares(), self._squares(images, height, width), self._taps)
        return pool(out, self.bias).reshape(-1, height, width, images.shape[3])

    def numbers(self, shape: Shape) -> int:
        """How many numbers the patches of an image of (height, width, channels) have."""
        height, width = (self._pooled(size) for size in shape[:2])
        return height * width * (2 * self._taps) ** 2 * shape[2]

    def _pooled(self, size: int) -> int:
        return (size + 2 * self.padding - self.side + 1) // 2

    @property
    def _taps(self) -> int:
        """The number of squares, across, from which a square of outputs is computed."""
        return self.side // 2 + 1

    def _squares(self, images: Array, height: int, width: int) -> Array:
        """The padded images with the four pixels of every square as channels."""
        across = [size + self._taps - 1 for size in (height, width)]
        sizes, p = zip(images.shape[1:3], across, strict=True), self.padding
        images = jnp.pad(images, ((0, 0), *((p, 2 * after - before - p) for before, after in sizes), (0, 0)))
        squares = images.reshape(-1, across[0], 2, across[1], 2, images.shape[3]).transpose(2, 4, 0, 1, 3, 5)
        return squares.reshape(-1, *across, images.shape[3])

    def _of_squares(self) -> Array:
        """The kernel from squares to squares: (taps * taps * 2 * 2 * channels in, 2 * 2 * channels out)"""
        one, rest = self.kernel.reshape(self.side, self.side, -1, len(self.bias)), 2 * self._taps - self.side
        moved = [
            jnp.pad(one, ((i, rest - i), (j, rest - j), (0, 0), (0, 0)))
            for i, j in itertools.product(range(2), repeat=2)
        ]
        kernel = jnp.stack(moved, 3).reshape(self._taps, 2, self._taps, 2, -1, 4 * len(self.bias))
        return kernel.transpose(0, 2, 1, 3, 4, 5).reshape(-1, 4 * len(self.bias))


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
        return self.dense(in_blocks(self._convolve, rows, self._most))

    def block(self, rows: int) -> int:
        """How many of these rows are convolved at once."""
        return min(rows, block_size(rows, self._most))

    @property
    def _most(self) -> int:
        """The most rows whose patches stay in the caches."""
        return BLOCK // self.convolutions[0].numbers(self.shape)

    def _convolve(self, rows: Array) -> Array:
        images = rows.reshape(rows.shape[0], *self.shape).transpose(3, 1, 2, 0)
        for convolution in self.convolutions:
            images = convolution(images)
        return images.transpose(3, 1, 2, 0).reshape(rows.shape[0], -1)


class Strided(eqx.Module):
    """A square convolution on (channels, height, width, rows) that moves by two pixels, then ReLU.

    `Convolution` is faster, but its derivative is written for reverse mode alone. A classifier that is the lower
    level needs Hessian products, which are forward over reverse, so this one leaves all derivatives to JAX.
    """

    kernel: Array  # (side * side * channels in, channels out)
    bias: Array
    side: int = eqx.field(static=True)

    def __init__(self, channels: tuple[int, int], side: int, *, key: Array) -> None:
        bound = 1 / math.sqrt(side * side * channels[0])
        self.kernel = jax.random.uniform(key, (side**2 * channels[0], channels[1]), minval=-bound, maxval=bound)
        self.bias, self.side = jnp.zeros(channels[1]), side

    def __call__(self, images: Array) -> Array:
        height, width = (self.size(size) for size in images.shape[1:3])
        shifted = [
            images[:, i : i + 2 * height - 1 : 2, j : j + 2 * width - 1 : 2]
            for i, j in itertools.product(range(self.side), repeat=2)
        ]
        patches = jnp.concatenate(shifted).reshape(len(self.kernel), -1)
        out = jax.nn.relu(self.kernel.T @ patches + self.bias[:, None])
        return out.reshape(-1, height, width, images.shape[3])

    def size(self, size: int) -> int:
        """The height or width of the result for this height or width of the images."""
        return (size - self.side) // 2 + 1


class SmallBody(eqx.Module):
    """Two convolutions that move by two pixels, on flat rows of an image's pixels."""

    convolutions: tuple[Strided, Strided]
    shape: Shape = eqx.field(static=True)

    def __init__(self, shape: Shape, *, key: Array) -> None:
        first, second = jax.random.split(key)
        self.convolutions = (Strided((shape[2], 8), 5, key=first), Strided((8, 16), 3, key=second))
        self.shape = shape
        if min(self._sizes) < 1:
            raise SettingsError(
                "problem.model = 'cnn' is wrong: it takes images of at least 9 x 9, "
                f"not {shape[0]} x {shape[1]}; use mlp"
            )

    def __call__(self, rows: Array) -> Array:
        images = rows.reshape(rows.shape[0], *self.shape).transpose(3, 1, 2, 0)
        for convolution in self.convolutions:
            images = convolution(images)
        return images.transpose(3, 1, 2, 0).reshape(rows.shape[0], -1)

    @property
    def block(self) -> int:
        """The most rows whose patches stay in the caches, which is up to ten times as fast without derivatives.

        Derivatives of up to a thousand rows are faster at once, so the network does not cut its rows itself.
        """
        height, width = (self.convolutions[0].size(size) for size in self.shape[:2])
        return BLOCK // (height * width * len(self.convolutions[0].kernel))

    @property
    def features(self) -> int:
        """How many numbers a row has after both convolutions."""
        return math.prod(self._sizes) * len(self.convolutions[1].bias)

    @property
    def _sizes(self) -> tuple[int, ...]:
        """Height and width after both convolutions."""
        first, second = self.convolutions
        return tuple(second.size(first.size(size)) for size in self.shape[:2])


def block_size(rows: int, most: int) -> int:
    """A multiple of LANES up to `most`, and of those the one for which the last block lacks the fewest rows."""
    sizes = range(max(1, most // LANES) * LANES, 0, -LANES)
    return min(sizes, key=lambda size: -rows % size)  # the first, and so the largest, of equals


def in_blocks(function: Callable[[Any], Any], rows: Any, most: int) -> Any:
    """function(rows), in blocks of `block_size`, with copies of the last row behind the rows in the last block."""
    count = len(jax.tree.leaves(rows)[0])
    size = block_size(count, most)
    if count <= size:
        return function(rows)

    def cut(a: Array) -> Array:
        padded = jnp.pad(a, ((0, -count % size), *((0, 0),) * (a.ndim - 1)), mode="edge")
        return padded.reshape(-1, size, *a.shape[1:])

    made = lax.map(function, jax.tree.map(cut, rows))
    return jax.tree.map(lambda a: a.reshape(-1, *a.shape[2:])[:count], made)


def mlp(inputs: int, hidden: int, classes: int, *, key: Array) -> TwoHalves:
    """A network inputs-hidden-classes with ReLU. In 784-200-10 the body has 157,000 parameters, the head 2,010."""
    body, head = jax.random.split(key)
    return TwoHalves(
        Dense((inputs, hidden), activate_last=True, key=body),
        Dense((hidden, classes), activate_last=False, key=head),
    )


def small_cnn(shape: Shape, classes: int, *, key: Array) -> TwoHalves:
    """conv 8 (5 x 5, by two pixels), conv 16 (3 x 3, by two pixels), and a linear layer, with ReLU.

    It has derivatives of every order and direction, so it may be the lower level: 7,546 parameters for CIFAR-10.
    """
    body, head = jax.random.split(key)
    made = SmallBody(shape, key=body)
    return TwoHalves(made, Dense((made.features, classes), activate_last=False, key=head))


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
