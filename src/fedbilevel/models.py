"""Models in two halves: the body is the upper variable, the head the lower one.

Convolutions are written as patches times a matrix. With one kernel for each client, as local steps give, that is
several times faster on a CPU than `lax.conv`; on other devices the compiler sees plain matrix products.
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import Array

from .errors import SettingsError

ModelName = Literal["mlp", "cnn"]
Shape = tuple[int, int, int]


class TwoHalves(NamedTuple):
    """A network cut in two: features = body(rows), scores = head(features), both on a batch of rows."""

    body: eqx.Module
    head: eqx.Module


class Dense(eqx.Module):
    """Fully connected layers with ReLU between them, and after the last when `activate_last`."""

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


class Convolution(eqx.Module):
    """A square convolution on (rows, height, width, channels), then ReLU and 2 x 2 max pooling."""

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
        p, s = self.padding, self.side
        images = jnp.pad(images, ((0, 0), (p, p), (p, p), (0, 0)))
        height, width = images.shape[1] - s + 1, images.shape[2] - s + 1
        shifted = [images[:, i : i + height, j : j + width] for i in range(s) for j in range(s)]
        out = jax.nn.relu(jnp.concatenate(shifted, axis=-1) @ self.kernel + self.bias)
        n, h, w, c = out.shape
        return out.reshape(n, h // 2, 2, w // 2, 2, c).max(axis=(2, 4))


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
                f"model cnn takes images of 28 x 28 or 32 x 32, not {shape[0]} x {shape[1]}; use the mlp"
            )
        self.convolutions = (
            Convolution((shape[2], 6), 5, padding, key=first),
            Convolution((6, 16), 5, 0, key=second),
        )
        self.dense = Dense((400, *dense), activate_last=True, key=last)
        self.shape = shape

    def __call__(self, rows: Array) -> Array:
        images = rows.reshape(rows.shape[0], *self.shape)
        for convolution in self.convolutions:
            images = convolution(images)
        return self.dense(images.reshape(rows.shape[0], -1))


def mlp(inputs: int, hidden: int, classes: int, *, key: Array) -> TwoHalves:
    """inputs-hidden-classes with ReLU. At 784-200-10 the body has 157,000 parameters, the head 2,010."""
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
