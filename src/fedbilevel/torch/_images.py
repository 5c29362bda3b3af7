"""Operations on images for a conversion to JAX, where those of torchax are slow on a CPU.

A convolution is a matrix times patches (`models.py`), with the rows of the batch as the last axis. Pooling
compares strided parts in the same order of axes, which is faster than JAX's own pooling and its derivative. Each
function here is made from the usual one of torchax, which serves the cases that do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import jax.numpy as jnp
from jax import Array

from ..models import convolve

Function = Callable[..., Any]


def convolution(usual: Function) -> Function:
    """`aten.convolution`, for functions that need first derivatives only, as `embed` does."""

    def convolution(
        images: Array,
        kernel: Array,
        bias: Array | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        transposed: bool,
        output_padding: Sequence[int],
        groups: int,
    ) -> Any:
        plain = not transposed and groups == 1 and {*stride, *dilation} == {1}
        if not plain or kernel.ndim != 4 or images.ndim != 4 or kernel.shape[2] != kernel.shape[3]:
            return usual(images, kernel, bias, stride, padding, dilation, transposed, output_padding, groups)
        channels, side = kernel.shape[0], kernel.shape[2]
        above, across = padding if len(padding) == 2 else 2 * tuple(padding)
        padded = jnp.pad(images, ((0, 0), (0, 0), (above, above), (across, across))).transpose(1, 2, 3, 0)
        made = convolve(kernel.transpose(2, 3, 1, 0).reshape(-1, channels), padded, side)
        made = made if bias is None else made + bias[:, None]
        height, width = (size - side + 1 for size in padded.shape[1:3])
        return made.reshape(channels, height, width, len(images)).transpose(3, 0, 1, 2)

    return convolution


def max_pool(usual: Function) -> Function:
    """`max_pool2d`. Of equal numbers the first has the derivative, as in PyTorch."""

    def max_pool(
        images: Array,
        kernel_size: int | Sequence[int],
        stride: int | Sequence[int] | None = None,
        padding: int | Sequence[int] = 0,
        dilation: int | Sequence[int] = 1,
        ceil_mode: bool = False,
        return_indices: bool = False,
    ) -> Any:
        side, step = _pair(kernel_size), _pair(stride or kernel_size)
        plain = side == step and _pair(padding) == (0, 0) and _pair(dilation) == (1, 1)
        if not plain or ceil_mode or return_indices or images.ndim != 4:
            return usual(images, kernel_size, stride, padding, dilation, ceil_mode, return_indices)
        last = images.transpose(1, 2, 3, 0)
        height, width = (size - size % k for size, k in zip(last.shape[1:3], side, strict=True))
        parts = [last[:, i : height : side[0], j : width : side[1]] for i, j in product(*map(range, side))]
        best = parts[0]
        for part in parts[1:]:
            best = jnp.where((part > best) | jnp.isnan(part), part, best)
        return best.transpose(3, 0, 1, 2)

    return max_pool


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    return (value[0], value[-1])
