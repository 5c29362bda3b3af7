"""The local loop of a linear layer under a softmax (`softmax.c`), as one call of XLA."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jaxlib.version import __version__ as jaxlib

from ._library import compiled

TARGET = "fedbilevel_softmax_walk"
KIND = 0  # 1, 2, 3: plain C, AVX2, AVX-512; 0: what the processor has


@lru_cache(maxsize=1)
def _registered() -> bool:
    """Make the compiled loop known to XLA; return whether there is one for this version of XLA."""
    version, walk = (compiled("softmax.so", name) for name in ("fedbilevel_jaxlib", TARGET))
    if version is None or walk is None:
        return False
    version.restype = ctypes.c_char_p
    if version().decode() != jaxlib:  # it was compiled for another one
        return False
    jax.ffi.register_ffi_target(TARGET, jax.ffi.pycapsule(walk), platform="cpu")
    return True


def softmax_walk(
    smoothing: float | None,
    layer: tuple[Array, Array | None],
    drift: tuple[Array, Array | None],
    known: Array,
    features: Array,
    index: Array,
    shares: Array,
    active: Array,
    rate: Array | float,
) -> tuple[Array, Array | None] | None:
    """W <- W - Σ_r m_r (softmax(W φ_r + b) - k_r) φ_rᵀ - rate ∇R(W) - C  along minibatches; None if it cannot.

    smoothing  s of the norm R(W) = sqrt(||W||² + s²); None: R(W) = ||W||² / 2
    layer      W of classes x features, and b of classes or None; `drift` has C and c in the same shapes
    known      k of all rows x classes, and `features` φ of all rows x features
    index      the rows of minibatches, `shares` their weights m, and `active` whether a minibatch is used
    """
    values = (layer[0], known, features, shares)
    plain = all(isinstance(a, Array) and a.dtype == jnp.float32 for a in values)
    if not plain or jax.default_backend() != "cpu" or not _registered():
        return None
    none = jnp.zeros(0, jnp.float32)
    bias, bias_drift = (none if b is None else b for b in (layer[1], drift[1]))
    shapes = [jax.ShapeDtypeStruct(a.shape, jnp.float32) for a in (layer[0], bias)]
    call = jax.ffi.ffi_call(TARGET, shapes, vmap_method="expand_dims")
    settings: dict[str, Any] = {
        "norm": np.int32(smoothing is not None),
        "smoothing": np.float32((smoothing or 0) ** 2),
        "kind": np.int32(KIND),
    }
    numbers = jnp.asarray(index, jnp.int32), shares, jnp.asarray(active, bool), jnp.asarray(rate, jnp.float32)
    weight, moved = call(layer[0], bias, known, drift[0], bias_drift, features, *numbers, **settings)
    return weight, None if layer[1] is None else moved
