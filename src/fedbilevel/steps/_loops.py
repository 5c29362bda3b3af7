"""Local loops of a client: a walk along draws, and the SVRG and SGD steps that most methods are made of.

The value that moves is a vector or a pytree of vectors. All streams are as long as that of the client with the
most steps; in the surplus steps of other clients the value does not change. If the value does not consist of JAX
arrays and the draws are not traced, as with an oracle of another library, the walk is an ordinary Python loop.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.scipy.sparse.linalg import cg

from ._affine import is_affine
from ._samples import Draw, Stream

PyTree = Any


@runtime_checkable
class KnowsLoops(Protocol):
    """A gradient that may know local steps along it which are faster than calls of itself; None if it does not."""

    def svrg(self, anchor: PyTree, q: PyTree, step: Array | float, stream: Stream) -> PyTree | None: ...

    def sgd(self, start: PyTree, step: Array | float, stream: Stream) -> PyTree | None: ...


def walk(move: Callable[..., PyTree], start: PyTree, *streams: Stream) -> PyTree:
    """Apply `move(value, draw, ...)` along one or several streams, which have the same number of steps."""
    if not _of_jax(start, streams):
        return _walked(move, start, streams)
    start = jax.tree.map(jnp.asarray, start)
    leaves, tree = jax.tree.flatten(streams)
    always = [isinstance(leaf, np.ndarray) and bool((leaf == leaf[:1]).all()) for leaf in leaves]

    def at(leaf: Any, alike: bool, number: Array) -> Any:
        if alike:
            return leaf[0]
        return lax.dynamic_index_in_dim(leaf, number, keepdims=False, allow_negative_indices=False)

    def body(number: Array, value: PyTree) -> PyTree:
        item = jax.tree.unflatten(tree, [at(*each, number) for each in zip(leaves, always, strict=True)])
        active = item[0].active
        for other in item[1:]:
            active = active & other.active
        moved = move(value, *(stream.draws for stream in item))
        if isinstance(active, np.bool_) and active:
            return moved
        return jax.tree.map(lambda new, old: jnp.where(active, new, old), moved, value)

    return lax.fori_loop(0, len(leaves[-1]), body, start)


def _of_jax(value: PyTree, streams: tuple[Stream, ...]) -> bool:
    """Whether JAX does the walk: the value consists of JAX arrays, or a draw does; numbers are then allowed."""
    return all(isinstance(leaf, Array) for leaf in jax.tree.leaves(value)) or any(
        isinstance(leaf, Array) for leaf in jax.tree.leaves(streams)
    )


def _walked(move: Callable[..., PyTree], value: PyTree, streams: tuple[Stream, ...]) -> PyTree:
    """The walk without tracing, for values of another library."""
    for i in range(len(streams[0].active)):
        if all(stream.active[i] for stream in streams):
            draws = [stream.draws for stream in streams]
            value = move(value, *(jax.tree.map(operator.itemgetter(i), d) for d in draws))
    return value


def svrg(
    gradient: Callable[[PyTree, Draw], PyTree], anchor: PyTree, q: PyTree, step: Array | float, stream: Stream
) -> PyTree:
    """SVRG-type local steps from the anchor a:  v ← v - step (∇(v; b) - ∇(a; b) + q)  along the draws b.

    At v = a the two gradients are equal whatever b is, so the first step is v = a - step q and costs nothing.
    On full batches ∇(a; b) is the same at every step and is computed once. On minibatches the two gradients are
    one batched computation, because the cost of a small step depends on the number of its operations, not on their
    size. Where the gradient is affine in v, as that of least squares, their difference is one Hessian product with
    v - a, which is half as much. If every derivative of a random loss makes choices of its own, the two gradients
    differ even at v = a and even on full batches, and none of this holds. A gradient that knows these steps itself
    is asked for them.
    """
    if isinstance(gradient, KnowsLoops) and (made := gradient.svrg(anchor, q, step, stream)) is not None:
        return made
    chance = stream.draws.chance
    if chance is not None and chance.anew:

        def plain(v: PyTree, b: Draw) -> PyTree:
            return _minus(v, step, gradient(v, b), gradient(anchor, b.apart(1)), q)

        return walk(plain, anchor, stream)
    traced = _of_jax(anchor, (stream,))
    if traced:
        first = jax.tree.map(lambda a, c: jnp.where(stream.active[0], a - step * c, a), anchor, q)
    else:
        first = jax.tree.map(lambda a, c: a - step * c, anchor, q) if stream.active[0] else anchor
    rest = jax.tree.map(lambda a: a[1:], stream)
    if stream.active.shape[0] == 1:
        return first
    if stream.draws.index is None and chance is None:
        correction = jax.tree.map(lambda c, g: c - g, q, gradient(anchor, stream.draws))

        def corrected(v: PyTree, b: Draw) -> PyTree:
            return jax.tree.map(lambda w, g, c: w - step * (g + c), v, gradient(v, b), correction)

        return walk(corrected, first, rest)

    if not traced:
        return walk(lambda v, b: _minus(v, step, gradient(v, b), gradient(anchor, b), q), first, rest)

    if is_affine(lambda v: gradient(v, jax.tree.map(lambda a: a[0], rest.draws)), anchor):

        def along(v: PyTree, b: Draw) -> PyTree:
            change = jax.tree.map(jnp.subtract, v, anchor)
            product = jax.jvp(lambda at: gradient(at, b), (anchor,), (change,))[1]
            return jax.tree.map(lambda w, g, c: w - step * (g + c), v, product, q)

        return walk(along, first, rest)

    def move(v: PyTree, b: Draw) -> PyTree:
        both = jax.vmap(lambda at: gradient(at, b))(jax.tree.map(lambda w, a: jnp.stack([w, a]), v, anchor))
        return jax.tree.map(lambda w, g, c: w - step * (g[0] - g[1] + c), v, both, q)

    return walk(move, first, rest)


def _minus(v: PyTree, step: Array | float, here: PyTree, there: PyTree, q: PyTree) -> PyTree:
    """v - step (here - there + q)"""
    return jax.tree.map(lambda w, g, a, c: w - step * (g - a + c), v, here, there, q)


def repeat(move: Callable[[Any, PyTree], PyTree], start: PyTree, count: Array | int) -> PyTree:
    """Apply `move(k, value)` for k = 0, ..., count - 1."""
    if all(isinstance(leaf, Array) for leaf in jax.tree.leaves(start)):
        return lax.fori_loop(0, count, move, start)
    for k in range(int(count)):
        start = move(k, start)
    return start


def solve(product: Callable[[Any], Any], b: Any, products: int) -> Any:
    """v with H v ≈ b by conjugate gradients from zero, with at most so many products with H."""
    if isinstance(b, Array):
        return cg(product, b, maxiter=products)[0]
    v, r = 0.0 * b, b
    d, square, enough = r, float((r * r).sum()), 1e-10 * float((b * b).sum())  # where JAX's function ends, too
    for _ in range(products):
        if square <= enough:
            break
        w = product(d)
        rate = square / float((d * w).sum())
        v, r = v + rate * d, r - rate * w
        before, square = square, float((r * r).sum())
        d = r + square / before * d
    return v


def sgd(gradient: Callable[[PyTree, Draw], PyTree], start: PyTree, step: Array | float, stream: Stream) -> PyTree:
    """Plain local steps:  v ← v - step ∇(v; b)  along the draws b."""
    if isinstance(gradient, KnowsLoops) and (made := gradient.sgd(start, step, stream)) is not None:
        return made
    return walk(lambda v, b: jax.tree.map(lambda w, g: w - step * g, v, gradient(v, b)), start, stream)
