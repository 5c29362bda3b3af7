"""Lower losses whose derivatives are known in closed form: a linear layer on the features, under a softmax.

With the features φ_r of a row r, its label t_r and the weights m_r of the mean over rows,

    g(y) = Σ_r m_r CE(W φ_r + b, t_r) + decay R(W, b)                      y = (W, b),  p_r = softmax(W φ_r + b)

    ∇_W g = Σ_r m_r (p_r - e_{t_r}) φ_rᵀ + decay ∇R                        ∇_b the same with 1 instead of φ_r
    ∇² g (V, c) = Σ_r m_r ṗ_r φ_rᵀ + decay ∇²R (V, c)                      ṗ = p ∘ (s - ⟨p, s⟩),  s = V φ_r + c
    ∇_φ_r ⟨∇g, (V, c)⟩ = m_r (Vᵀ (p_r - e_{t_r}) + Wᵀ ṗ_r)

JAX finds the same derivatives by itself, with more operations and products. In the difference of two gradients
on the same rows, which an SVRG step needs, the labels cancel. The probabilities at the anchor are the same in all
steps, so they are computed once for all rows:

    v ← v - step (Σ_r m_r (p_r(v) - p_r(a)) φ_rᵀ + decay (∇R(v) - ∇R(a)) + q)

This is two products a step, where the two gradients are four. The gradient of R is a multiple of each array.
Where `native/softmax.c` was compiled, the whole loop is one call of it, in half of the time.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from jax import Array, lax
from jax.flatten_util import ravel_pytree

from .batch import Batch
from .errors import SettingsError
from .native import softmax_walk
from .steps import Stream

PyTree = Any
Regulariser = Literal["norm", "ridge"]
SMALL = 64  # layers with fewer weights are left to XLA, which merges so little work with what is around it
LEAST = 2**16  # the numbers of gathered features, below which a block of steps is not cut further


def norm(y: PyTree, smoothing: float) -> Array:
    """Σ sqrt(||w||² + s²) over the arrays of y: the norm, not squared, that the baseline's released code adds.

    The norm itself has an unbounded second derivative at zero, and its gradient of constant size drives the bias
    there. Hessian products then explode: in FedNest's loop, ||p|| grew by a factor of 24 per round. The smoothing
    s bounds the curvature by 1/s. With s = 0 it is the norm itself, with derivatives of zero at zero.
    """
    return sum((_root(jnp.sum(w**2) + smoothing**2) for w in jax.tree.leaves(y)), jnp.zeros(()))


def _root(square: Array) -> Array:
    """The square root, with derivatives of zero at zero instead of infinite ones."""
    there = square > 0
    return jnp.where(there, jnp.sqrt(jnp.where(there, square, 1.0)), 0.0)


def ridge(y: PyTree) -> Array:
    """1/2 Σ ||w||², which makes the lower problem strongly convex, as the theory requires."""
    return 0.5 * sum((jnp.sum(w**2) for w in jax.tree.leaves(y)), jnp.zeros(()))


class Layer(NamedTuple):
    """The arrays of a linear layer: weight (classes x features), and bias (classes) or None."""

    weight: Array
    bias: Array | None

    def scores(self, features: Array) -> Array:
        """W φ_r + b, as an array of classes x rows."""
        made = (features @ self.weight.T).T  # XLA takes half of the time for this order
        return made if self.bias is None else made + self.bias[:, None]

    def along(self, changes: Array, features: Array) -> Layer:
        """Σ_r d_r φ_rᵀ and Σ_r d_r for d of classes x rows: the derivative of ⟨d, scores⟩."""
        return Layer(changes @ features, None if self.bias is None else jnp.sum(changes, axis=1))

    def each(self, function: Callable[..., Array], *others: Layer) -> Layer:
        """function(array, ...) of the weights and of the biases."""
        return Layer(*(None if a[0] is None else function(*a) for a in zip(self, *others, strict=True)))  # type: ignore[arg-type]


def is_layer(y: PyTree) -> bool:
    """Whether the parameters of a pytree are those of one linear layer, as `eqx.nn.Linear` has them."""
    shapes = sorted((a.shape for a in _arrays(y)), key=len)
    return [len(shape) for shape in shapes] == [2] or (
        [len(shape) for shape in shapes] == [1, 2] and shapes[0][0] == shapes[1][0]
    )


def _arrays(y: PyTree) -> list[Array]:
    return jax.tree.leaves(eqx.filter(y, eqx.is_inexact_array))


def _layer(y: PyTree) -> Layer:
    """The two arrays of a pytree, told apart by their dimensions."""
    if not is_layer(y):
        found = " and ".join(str(a.shape) for a in _arrays(y)) or "no array"
        raise SettingsError(
            f"heads.softmax needs a y of one linear layer, a weight of classes x features and a bias of classes, "
            f"as eqx.nn.Linear has them; this y has {found}"
        )
    by = {a.ndim: a for a in _arrays(y)}
    return Layer(by[2], by.get(1))


def _like(y: PyTree, layer: Layer) -> PyTree:
    """A layer in the structure of y's parameters."""
    parameters = eqx.filter(y, eqx.is_inexact_array)
    return jax.tree.map(lambda a: layer.weight if a.ndim == 2 else layer.bias, parameters)


@dataclass(frozen=True)
class Softmax:
    """Cross entropy of a linear layer on the features, with decay times a regulariser. Make it by `softmax`."""

    decay: float = 0.0
    regulariser: Regulariser = "ridge"
    smoothing: float = 1e-3

    def __call__(self, x: PyTree, y: PyTree, batch: Batch) -> Array:
        """The loss. It depends on x by the features only."""
        scores = _layer(y).scores(_features(batch)).T
        loss = batch.mean(optax.softmax_cross_entropy_with_integer_labels(scores, batch.targets))
        return loss if self.decay == 0 else loss + self.decay * self._penalty(tuple(_layer(y)))

    def check(self, y: PyTree) -> None:
        """Raise `SettingsError` if y is not one linear layer."""
        _layer(y)

    def gradient(self, y: PyTree, batch: Batch) -> PyTree:
        """∇_y g, in the structure of y."""
        layer, features = _layer(y), _features(batch)
        made = layer.along(_surplus(layer, batch) * _shares(batch.weights), features)
        return _like(y, self._regularised(made, layer.each(self._slope, layer)))

    def hessian_product(self, y: PyTree, v: PyTree, batch: Batch) -> PyTree:
        """∇²_y g v, in the structure of y."""
        layer, direction, features = _layer(y), _layer(v), _features(batch)
        made = layer.along(_turn(layer, direction, features) * _shares(batch.weights), features)
        return _like(y, self._regularised(made, layer.each(self._bend, direction)))

    def features_gradient(self, y: PyTree, batch: Batch) -> Array:
        """∇_φ g for all rows, which the pullback of `embed` takes to ∇_x g."""
        layer = _layer(y)
        return (_surplus(layer, batch) * _shares(batch.weights)).T @ layer.weight

    def mixed_product(self, y: PyTree, v: PyTree, batch: Batch) -> Array:
        """∇_φ ⟨∇_y g, v⟩ for all rows, which the pullback of `embed` takes to ∇_x∇_y g v."""
        layer, direction, shares = _layer(y), _layer(v), _shares(batch.weights)
        turned = _turn(layer, direction, _features(batch))
        return (_surplus(layer, batch) * shares).T @ direction.weight + (turned * shares).T @ layer.weight

    def svrg(self, anchor: PyTree, q: PyTree, step: Array | float, rows: Batch, stream: Stream) -> PyTree:
        """SVRG-type steps from the anchor along minibatches of the rows; the first of them is  a - step q."""
        layer, towards = _layer(anchor), _layer(q)
        first = layer.each(lambda a, c: jnp.where(stream.active[0], a - step * c, a), towards)
        drift = layer.each(lambda a, c: step * (c - self.decay * self._slope(a, a)), towards)
        known = jax.nn.softmax(layer.scores(_features(rows)), axis=0)
        rest = jax.tree.map(lambda a: a[1:], stream)
        return _like(anchor, self._walk(first, known, drift, step, rows, rest))

    def sgd(self, start: PyTree, step: Array | float, rows: Batch, stream: Stream) -> PyTree:
        """Plain steps from the start along minibatches of the rows."""
        layer = _layer(start)
        known = _labels(rows.targets, layer.weight.shape[0])
        return _like(start, self._walk(layer, known, layer.each(jnp.zeros_like), step, rows, stream))

    def _walk(
        self, start: Layer, known: Array, drift: Layer, step: Array | float, rows: Batch, stream: Stream
    ) -> Layer:
        """v ← v - step (Σ_r m_r (p_r(v) - k_r) φ_rᵀ + decay ∇R(v)) - drift, with k_r of classes x all rows."""
        shares = step * jax.vmap(_shares)(stream.draws.weight)
        operands = (
            start,
            drift,
            known,
            _features(rows),
            stream.draws.index,
            shares,
            stream.active,
            step * self.decay,
        )
        made: Layer = self._native(*operands)
        return made

    @property
    def _native(self) -> Callable[..., Layer]:
        """The walk by a compiled loop where there is one. JAX differentiates it as it does the walk by XLA."""

        @jax.custom_jvp
        def walk(start: Layer, drift: Layer, known: Array, *others: Any) -> Layer:
            smoothing = self.smoothing if self.regulariser == "norm" else None
            large = start.weight.size >= SMALL
            made = softmax_walk(smoothing, start, drift, known.T, *others) if large else None
            return self._by_xla(start, drift, known, *others) if made is None else Layer(*made)

        walk.defjvp(lambda primals, tangents: jax.jvp(self._by_xla, primals, tangents))
        return walk

    def _by_xla(
        self,
        start: Layer,
        drift: Layer,
        known: Array,
        features: Array,
        index: Array,
        shares: Array,
        active: Array,
        rate: Array | float,
    ) -> Layer:
        """The walk by operations of XLA.

        The rows of a block of steps are gathered at once, which is faster than a gather in each step. A block has
        about as many rows as the client, so its memory is that of the features.
        """
        count, size = index.shape
        most = max(features.shape[0] // size, LEAST // (size * features.shape[1]), 1)

        def block(v: Layer, items: tuple[Array, Array, Array]) -> tuple[Layer, None]:
            index, shares, active = items
            expected = jnp.swapaxes(known.T[index], 1, 2) * shares[:, None]
            return lax.scan(move, v, (features[index], expected, shares, active))[0], None

        def move(v: Layer, item: tuple[Array, Array, Array, Array]) -> tuple[Layer, None]:
            taken, expected, shares, active = item
            made = v.along(jax.nn.softmax(v.scores(taken), axis=0) * shares - expected, taken)

            def moved(a: Array, g: Array, c: Array) -> Array:
                return jnp.where(active, a - rate * self._slope(a, a) - g - c, a)

            return v.each(moved, made, drift), None

        items = index, shares, active
        if count <= most:
            return block(start, items)[0]
        blocks = -(-count // most)
        length = -(-count // blocks)

        def cut(a: Array) -> Array:
            filled = jnp.pad(a, ((0, blocks * length - count), *((0, 0) for _ in a.shape[1:])))
            return filled.reshape(blocks, length, *a.shape[1:])

        return lax.scan(block, start, jax.tree.map(cut, items))[0]

    def _penalty(self, y: PyTree) -> Array:
        return ridge(y) if self.regulariser == "ridge" else norm(y, self.smoothing)

    def _regularised(self, made: Layer, penalty: Layer) -> Layer:
        return made if self.decay == 0 else made.each(lambda a, r: a + self.decay * r, penalty)

    def _slope(self, w: Array, v: Array) -> Array:
        """The gradient of R at an array w is a number times w; here that number times v."""
        return v if self.regulariser == "ridge" else v * self._per_norm(w)

    def _bend(self, w: Array, v: Array) -> Array:
        """∇²R v at w. For the norm n = sqrt(||w||² + s²) it is (v - w ⟨w, v⟩ / n²) / n."""
        if self.regulariser == "ridge":
            return v
        each = self._per_norm(w)
        return each * (v - w * (jnp.vdot(w, v) * each**2))

    def _per_norm(self, w: Array) -> Array:
        """1 / sqrt(||w||² + s²), and zero where that is infinite."""
        square = jnp.sum(w**2) + self.smoothing**2
        return lax.rsqrt(square) if self.smoothing > 0 else jnp.where(square > 0, lax.rsqrt(square), 0.0)


def softmax(decay: float = 0.0, regulariser: Regulariser = "ridge", smoothing: float = 1e-3) -> Softmax:
    """A loss of a `Problem`: cross entropy of a linear layer on `batch.features`, plus decay times a regulariser.

    y is the layer: a pytree with a weight of classes x features and a bias of classes, or without a bias, as
    `eqx.nn.Linear` has them. Targets are the numbers of classes. The regulariser is the `ridge` 1/2 Σ ||w||², or
    the `norm` Σ sqrt(||w||² + s²) with the smoothing s. Derivatives and local steps then use closed forms.
    """
    if regulariser not in get_args(Regulariser):
        raise SettingsError(f"regulariser = {regulariser!r} is wrong; use 'ridge' or 'norm'")
    if decay < 0 or smoothing < 0:
        raise SettingsError(f"decay = {decay} and smoothing = {smoothing} are wrong: neither may be negative")
    return Softmax(decay, regulariser, smoothing)


class OnVectors(NamedTuple):
    """A head at flat vectors: what an oracle needs of it."""

    head: Softmax
    restore: Callable[[Array], PyTree]

    def gradient(self, y: Array, batch: Batch) -> Array:
        return _flat(self.head.gradient(self.restore(y), batch))

    def hessian_product(self, y: Array, v: Array, batch: Batch) -> Array:
        return _flat(self.head.hessian_product(self.restore(y), self.restore(v), batch))

    def features_gradient(self, y: Array, batch: Batch) -> Array:
        return self.head.features_gradient(self.restore(y), batch)

    def mixed_product(self, y: Array, v: Array, batch: Batch) -> Array:
        return self.head.mixed_product(self.restore(y), self.restore(v), batch)

    def svrg(self, anchor: Array, q: Array, step: Array | float, rows: Batch, stream: Stream) -> Array:
        return _flat(self.head.svrg(self.restore(anchor), self.restore(q), step, rows, stream))

    def sgd(self, start: Array, step: Array | float, rows: Batch, stream: Stream) -> Array:
        return _flat(self.head.sgd(self.restore(start), step, rows, stream))


def _flat(tree: PyTree) -> Array:
    return ravel_pytree(tree)[0]


def _features(batch: Batch) -> Array:
    features = batch.features
    if getattr(features, "ndim", None) != 2:
        shape = getattr(features, "shape", f"of type {type(features).__name__}")
        raise SettingsError(
            f"heads.softmax needs features of rows x numbers, and they are {shape}; "
            "give an embed that returns one array of two dimensions"
        )
    return jnp.asarray(features)


def _shares(weights: Array) -> Array:
    """m_r, the weights of the mean over rows."""
    total = jnp.sum(weights)
    return weights / jnp.where(total > 0, total, 1.0)


def _labels(targets: Array, classes: int) -> Array:
    """e_{t_r} as columns. A label that is no class is not a number, as in the loss."""
    there = (targets >= 0) & (targets < classes)
    return jnp.where(there, jax.nn.one_hot(targets, classes, axis=0), jnp.nan)


def _surplus(layer: Layer, batch: Batch) -> Array:
    """p_r - e_{t_r}, as columns."""
    scores = layer.scores(_features(batch))
    return jax.nn.softmax(scores, axis=0) - _labels(batch.targets, scores.shape[0])


def _turn(layer: Layer, direction: Layer, features: Array) -> Array:
    """ṗ_r, the derivative of the probabilities along a direction, as columns."""
    p, s = jax.nn.softmax(layer.scores(features), axis=0), direction.scores(features)
    return p * (s - jnp.sum(p * s, axis=0))
