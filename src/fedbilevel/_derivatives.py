"""A client's derivatives by JAX, on flat float32 vectors.

    f_x = ∇_x f_i    f_y = ∇_y f_i    g_y = ∇_y g_i    g_yy v = ∇²_y g_i v    g_xy v = ∇_x∇_y g_i v

and f_w = ∇_w f_i and g_wy v = ∇_w∇_y g_i v, if the client has variables w of its own.

No matrix is formed: g_yy v is forward over reverse mode, and g_xy v is the x-gradient of the derivative of g_i
along v. Where a loss is a head with closed forms (`heads.py`), those are used instead, and its local steps too.

With `embed`, everything that depends only on the held x is computed once: the features of all rows and the
pullback of `embed` (its vector-Jacobian product with the forward pass stored). Every y-derivative then works on
stored features, and each x-derivative on all rows at the held x costs one product instead of a forward and a
backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from .batch import Batch
from .errors import StepError
from .heads import OnVectors
from .oracle import Arrays, Directions, Kept, PartArrays, recall
from .own import KEPT, OwnPart
from .steps import Draw, PartName, Stream

PyTree = Any
ALL = Draw(None, None)  # all rows


class Losses(Protocol):
    """The two losses at flat vectors, and the features, which depend only on x and the inputs."""

    @property
    def embed(self) -> Any: ...

    @property
    def own_part(self) -> OwnPart | None: ...

    @property
    def flat_y(self) -> Any: ...

    def features(self, x: Array, inputs: PyTree) -> PyTree: ...

    def measured(self, x: Array, y: Array, batch: Batch) -> Mapping[str, Array]: ...

    def loss(self, level: str, x: Array, y: Array, batch: Batch) -> Array: ...

    def head(self, level: str) -> OnVectors | None:
        """The loss of a level as a head with closed forms, if it is one."""


class Derivative(Enum):
    """What is computed from a loss. A random loss may make choices of its own for each of them."""

    F = 0
    G = 1
    F_X = 2
    F_Y = 3
    G_Y = 4
    G_YY = 5
    G_XY = 6
    F_W = 7
    G_WY = 8
    G_X = 9


class Embedded(NamedTuple):
    """embed(x, inputs) of all rows, and its pullback from features to x."""

    features: PyTree
    pullback: Any


class Memory(NamedTuple):
    """The values that a client computes once for a new x."""

    lower: Embedded
    upper: Embedded


def remember(problem: Losses, x: Array, data: Arrays) -> Memory | None:
    """Embed both parts at x; None when the problem has no `embed`."""
    if problem.embed is None:
        return None
    return Memory(*(_embedded(problem, x, part) for part in (data.lower, data.upper)))


def _embedded(problem: Losses, x: Array, part: PartArrays) -> Embedded:
    """Features and pullback. A forward pass is not stored, but redone, if it takes over four times the inputs."""

    def embed(v: Array) -> PyTree:
        return problem.features(v, part.inputs)

    stored = jax.eval_shape(lambda v: jax.vjp(embed, v)[1], x)
    heavy = _nbytes(stored) > 4 * (_nbytes(part.inputs) + _nbytes(x))
    return Embedded(*jax.vjp(jax.checkpoint(embed) if heavy else embed, x))


def _nbytes(tree: PyTree) -> int:
    return sum(int(np.prod(a.shape)) * a.dtype.itemsize for a in jax.tree.leaves(tree))


class LowerGradient:
    """∇_y g_i of a client as a function, and the local steps along it that a head has in closed form."""

    def __init__(self, oracle: JaxOracle) -> None:
        self._oracle = oracle

    def __call__(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        """∇_y g_i(x, y; ζ)"""
        return self._oracle._gradient_y("lower", y, zeta, at, Derivative.G_Y)

    def svrg(self, anchor: Array, q: Array, step: Array | float, stream: Stream) -> Array | None:
        """The steps of `steps.svrg`, or None if they have no closed form."""
        head, rows = self._oracle._lower_head(), stream.draws
        if head is None or rows.index is None or rows.chance is not None:
            return None
        return head.svrg(anchor, q, step, self._oracle._batch("lower", ALL), stream)

    def sgd(self, start: Array, step: Array | float, stream: Stream) -> Array | None:
        """The steps of `steps.sgd`, or None if they have no closed form."""
        head, rows = self._oracle._lower_head(), stream.draws
        if head is None or rows.index is None or rows.chance is not None:
            return None
        return head.sgd(start, step, self._oracle._batch("lower", ALL), stream)


class JaxOracle:
    """The derivatives of one client's losses at the vectors it holds, by JAX.

    Stored features are used if the x of a derivative is the held `c.x` itself.
    """

    def __init__(
        self,
        problem: Losses,
        held: Mapping[str, Array],
        data: Arrays,
        memory: Memory | None = None,
        kept: Mapping[str, Kept] | None = None,
    ) -> None:
        self._problem, self._held, self._data, self._memory = problem, held, data, memory
        self._kept = kept or {}
        self.w: Any = None if problem.own_part is None else self._own(problem.own_part)
        self.g_y = LowerGradient(self)

    def moved(self, x: Array, *rows: Draw) -> JaxOracle | None:
        """The client at another x, with one pass through `embed` for all derivatives there; None if it gains none.

        It gains none if there is no `embed`, or if some of these draws are not all rows, since the pass has all.
        """
        if self._problem.embed is None or any(each.index is not None for each in rows):
            return None

        def passed(part: PartArrays) -> Embedded:
            return Embedded(*jax.vjp(lambda v: self._problem.features(v, part.inputs), x))

        memory = Memory(*map(passed, (self._data.lower, self._data.upper)))
        return JaxOracle(self._problem, {**self._held, "x": x}, self._data, memory, self._kept)

    @property
    def x(self) -> Array:
        return self._held["x"]

    @property
    def y(self) -> Array:
        return self._held["y"]

    @property
    def y_start(self) -> Array:
        start: Array = self._problem.flat_y.vector
        return start

    def held(self, name: str) -> Array:
        """A vector that the server gave the client to hold, by its name."""
        return self._held[name]

    def own(self, name: str, default: PyTree) -> PyTree:
        """The `Own` field of this name that an earlier step returned, or the default if there is none yet."""
        return recall(self._kept, name, default)

    def f(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """f_i(x, y; ξ)"""
        return self._loss("upper", xi, Derivative.F)(*self._point("upper", xi, at), y)

    def g(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        """g_i(x, y; ζ)"""
        return self._loss("lower", zeta, Derivative.G)(*self._point("lower", zeta, at), y)

    def f_y(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """∇_y f_i(x, y; ξ)"""
        return self._gradient_y("upper", y, xi, at, Derivative.F_Y)

    def g_yy(self, y: Array, v: Array, u: Draw, at: Array | None = None) -> Array:
        """∇²_y g_i(x, y; u) v"""
        head = self._problem.head("lower")
        if head is not None:
            return head.hessian_product(y, v, self._batch("lower", u, at))
        return jax.jvp(lambda w: self._gradient_y("lower", w, u, at, Derivative.G_YY), (y,), (v,))[1]

    def f_x(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """∇_x f_i(x, y; ξ)"""
        head = self._problem.head("upper")
        if head is not None:
            return self._pulled_back("upper", xi, at, lambda batch: head.features_gradient(y, batch))
        loss = self._loss("upper", xi, Derivative.F_X)
        return self._gradient_x("upper", xi, at, lambda x, features: loss(x, features, y))

    def g_xy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        """∇_x ⟨∇_y g_i(x, y; χ), v⟩"""
        head = self._problem.head("lower")
        if head is not None:
            return self._pulled_back("lower", chi, at, lambda batch: head.mixed_product(y, v, batch))
        loss = self._loss("lower", chi, Derivative.G_XY)

        def along(x: Array, features: PyTree) -> Array:
            return jax.jvp(lambda w: loss(x, features, w), (y,), (v,))[1]

        return self._gradient_x("lower", chi, at, along)

    def g_x(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        """∇_x g_i(x, y; ζ)"""
        loss = self._loss("lower", zeta, Derivative.G_X)
        return self._gradient_x("lower", zeta, at, lambda x, features: loss(x, features, y))

    def directions(self, y: Array, v: Array, zeta: Draw, xi: Draw, at: Array | None = None) -> Directions:
        """f_x - g_xy v, g_y and g_yy v - f_y, with one pass through `embed` for each part."""
        upper, lower = self._loss("upper", xi, Derivative.F_X), self._loss("lower", zeta, Derivative.G_XY)

        def slope(x: Array, features: PyTree, y: Array) -> Array:
            return jax.jvp(lambda w: lower(x, features, w), (y,), (v,))[1]

        f_x, f_y = _gradients(upper, y, *self._with_pullback("upper", xi, at))
        x, features, pullback = self._with_pullback("lower", zeta, at)
        g_xy, g_yy = _gradients(slope, y, x, features, pullback)
        return Directions(f_x - g_xy, jax.grad(lower, 2)(x, features, y), g_yy - f_y)

    def f_w(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """∇_w f_i(x, y; ξ)"""
        return jax.grad(self._loss("upper", xi, Derivative.F_W), 3)(*self._point("upper", xi, at), y, self.w)

    def g_wy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        """∇_w ⟨∇_y g_i(x, y; χ), v⟩"""
        point, loss = self._point("lower", chi, at), self._loss("lower", chi, Derivative.G_WY)
        return jax.grad(lambda w: jax.jvp(lambda u: loss(*point, u, w), (y,), (v,))[1])(self.w)

    def metrics(self, y: Array, names: tuple[str, ...], at: Array | None = None) -> Array:
        """The problem's metrics of these names at (x, y), on all test rows of the client."""
        x, test = self.x if at is None else at, self._data.test
        if test is None:
            raise StepError(
                "the client has no test rows, so it cannot measure metrics; give ClientData a test part"
            )
        ids = jnp.arange(jax.tree.leaves(test.inputs)[0].shape[0])
        weights, features = (ids < test.rows).astype(jnp.float32), self._problem.features(x, test.inputs)
        found = self._problem.measured(x, y, Batch(test.inputs, test.targets, weights, features, ids=ids))
        return jnp.stack([jnp.asarray(found[name], jnp.float32) for name in names])

    def _own(self, part: OwnPart) -> Array:
        """The client's own variables: those that it has kept, or else their initial values."""
        if KEPT in self._kept:
            return part.joined(self._kept[KEPT].leaves)
        return jnp.asarray(part.start(self._data.padded))

    def _gradient_y(self, part: PartName, y: Array, rows: Draw, at: Array | None, of: Derivative) -> Array:
        head = self._problem.head(part)
        if head is not None:
            return head.gradient(y, self._batch(part, rows, at))
        return jax.grad(self._loss(part, rows, of), 2)(*self._point(part, rows, at), y)

    def _lower_head(self) -> OnVectors | None:
        """The head of the lower loss, if the features of all rows are known without an embedding of their own."""
        known = self._problem.embed is None or self._memory is not None
        return self._problem.head("lower") if known else None

    def _batch(self, part: PartName, rows: Draw, at: Array | None = None) -> Batch:
        """The rows with their features, for a loss that is neither random nor of own variables."""
        return self._rows(part, rows)._replace(features=self._point(part, rows, at)[1])

    def _rows(self, part: PartName, rows: Draw) -> Batch:
        """The rows without their features."""
        data: PartArrays = getattr(self._data, part)
        inputs, targets = _take((data.inputs, data.targets), rows)
        ids, weights = rows.index, rows.weight
        if weights is None:
            ids = jnp.arange(getattr(self._data.padded, part))
            weights = (ids < data.rows).astype(jnp.float32)
        return Batch(inputs, targets, weights, None, ids=ids)

    def _loss(self, part: PartName, rows: Draw, of: Derivative) -> Any:
        """The loss whose derivative is taken, as a function of x, of the features of the rows, of y, and of w."""
        key = None if rows.chance is None else rows.chance.key(of.value)
        batch = self._rows(part, rows)._replace(key=key)
        variables, padded = self._problem.own_part, self._data.padded

        def loss(x: Array, features: PyTree, y: Array, w: Any = self.w) -> Array:
            own = None if variables is None else variables.restore(w, padded)
            return self._problem.loss(part, x, y, batch._replace(features=features, own=own))

        return loss

    def _point(self, part: PartName, rows: Draw, at: Array | None = None) -> tuple[Array, PyTree]:
        """x, and the features of the rows at x; at the held x these are the stored features."""
        x = self.x if at is None else at
        if self._memory is not None and x is self.x:
            return x, _take(getattr(self._memory, part).features, rows)
        return x, self._problem.features(x, _take(getattr(self._data, part).inputs, rows))

    def _with_pullback(self, part: PartName, rows: Draw, at: Array | None) -> tuple[Array, PyTree, Any]:
        """x, the features of the rows at x, and the pullback of `embed`, or None without one."""
        x = self.x if at is None else at
        if self._memory is not None and x is self.x and rows.index is None:
            return x, *getattr(self._memory, part)
        inputs = _take(getattr(self._data, part).inputs, rows)
        if self._problem.embed is None:
            return x, inputs, None
        return x, *jax.vjp(lambda v: self._problem.features(v, inputs), x)

    def _gradient_x(self, part: PartName, rows: Draw, at: Array | None, function: Any) -> Array:
        """The total x-gradient of function(x, features(x))."""
        x = self.x if at is None else at
        if self._memory is not None and x is self.x and rows.index is None:
            stored: Embedded = getattr(self._memory, part)
            direct, through = jax.grad(function, (0, 1))(x, stored.features)
            return direct + stored.pullback(through)[0]
        inputs = _take(getattr(self._data, part).inputs, rows)
        return jax.grad(lambda v: function(v, self._problem.features(v, inputs)))(x)

    def _pulled_back(self, part: PartName, rows: Draw, at: Array | None, cotangent: Any) -> Array:
        """The x-gradient of a function of the features, from cotangent(batch), its gradient by the features."""
        x, features, pullback = self._with_pullback(part, rows, at)
        if pullback is None:
            return jnp.zeros_like(x)
        made: Array = pullback(cotangent(self._rows(part, rows)._replace(features=features)))[0]
        return made


def _gradients(function: Any, y: Array, x: Array, features: PyTree, pullback: Any) -> tuple[Array, Array]:
    """The total gradient of function(x, features(x), y) in x, and that in y."""
    if pullback is None:
        return jax.grad(function, (0, 2))(x, features, y)
    in_x, through, in_y = jax.grad(function, (0, 1, 2))(x, features, y)
    return in_x + pullback(through)[0], in_y


def _take(tree: PyTree, rows: Draw) -> PyTree:
    """The rows of a draw, whose places are never negative or behind the last row."""
    if rows.index is None:
        return tree

    def take(part: Any) -> Array:
        return jnp.asarray(part).at[rows.index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    return jax.tree.map(take, tree)
