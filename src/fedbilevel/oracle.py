"""A client as its steps see it: derivatives at flat vectors, held vectors, and kept states.

`Oracle` is the protocol. A problem makes the oracle of its clients (`problem.oracle`), so its derivatives may come
from JAX (`_derivatives.py`, which every `Problem` uses), from another library, or from a closed form.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from .data import ClientSize
from .errors import StepError
from .steps import Draw, Stream, X, Y, sgd
from .stepsizes import Moves

PyTree = Any
COLUMNS = 64  # the number of unit vectors along which derivatives are taken at once


class Directions(NamedTuple):
    """The directions in which a single-loop method moves x, y and v ≈ (∇²_y g)^{-1} ∇_y f. It is a reply, too.

        x:  ∇_x f_i - ∇_x∇_y g_i v        y:  ∇_y g_i        v:  ∇²_y g_i v - ∇_y f_i

    All three are linear in the losses, so their means over clients are the directions of the mean losses. Where
    all three means are zero, y is the lower solution and x is a stationary point.
    """

    x: X
    y: Y
    v: Annotated[Y, Moves.PRODUCT]


class Oracle(Protocol):
    """The derivatives of one client's losses, and the vectors that the client has.

    f_x = ∇_x f_i    f_y = ∇_y f_i    g_y = ∇_y g_i    g_yy v = ∇²_y g_i v    g_xy v = ∇_x∇_y g_i v
    g_x = ∇_x g_i    is asked for by first-order methods only

    `c.x` and `c.y` are the held vectors. The first argument of a derivative is the y at which it is taken, `at` is
    the x (default: the held one), and the last argument has the rows.
    """

    @property
    def x(self) -> Array:
        """The x that the client holds."""

    @property
    def y(self) -> Array:
        """The y that the client holds."""

    def held(self, name: str) -> Array:
        """A vector that the server gave the client to hold, by its name."""

    def own(self, name: str, default: PyTree) -> PyTree:
        """The `Own` field of this name that an earlier step returned, or the default if there is none yet."""

    def f(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """f_i(x, y; ξ)"""

    def g(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        """g_i(x, y; ζ)"""

    def f_x(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """∇_x f_i(x, y; ξ)"""

    def f_y(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """∇_y f_i(x, y; ξ)"""

    def g_y(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        """∇_y g_i(x, y; ζ)"""

    def g_yy(self, y: Array, v: Array, u: Draw, at: Array | None = None) -> Array:
        """∇²_y g_i(x, y; u) v"""

    def g_xy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        """∇_x ⟨∇_y g_i(x, y; χ), v⟩"""

    def g_x(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        """∇_x g_i(x, y; ζ)"""


@runtime_checkable
class OnePass(Protocol):
    """An oracle that computes all three directions at once, which is faster than one derivative after another."""

    def directions(self, y: Array, v: Array, zeta: Draw, xi: Draw, at: Array | None = None) -> Directions:
        """The directions at (x, y, v) on rows ζ of the lower loss and ξ of the upper one."""


def directions(c: Oracle, y: Array, v: Array, zeta: Draw, xi: Draw, at: Array | None = None) -> Directions:
    """The directions at (x, y, v) on rows ζ of the lower loss and ξ of the upper one, as fast as the oracle can.

    If every derivative of a random loss makes choices of its own, the five derivatives are taken one by one.
    """
    anew = any(rows.chance is not None and rows.chance.anew for rows in (zeta, xi))
    if isinstance(c, OnePass) and not anew:
        return c.directions(y, v, zeta, xi, at)
    return Directions(
        c.f_x(y, xi, at) - c.g_xy(y, v, zeta, at), c.g_y(y, zeta, at), c.g_yy(y, v, zeta, at) - c.f_y(y, xi, at)
    )


@runtime_checkable
class OnePoint(Protocol):
    """An oracle that JAX does not trace, and that computes many products at one point faster than one by one."""

    def hessian(self, y: Array, u: Draw, at: Array | None = None) -> Callable[[Any], Any]:
        """The function v ↦ ∇²_y g_i(x, y; u) v"""

    def hessian_matrices(self, y: Array, u: Stream, at: Array | None = None) -> Any:
        """∇²_y g_i(x, y; u) as a matrix, stacked over the draws of u"""

    def mixed_matrix(self, y: Array, chi: Draw, at: Array | None = None) -> Any:
        """∇_x∇_y g_i(x, y; χ) as a matrix, with a row for each component of x"""


@runtime_checkable
class Moving(Protocol):
    """An oracle that has several derivatives at another x for one pass through the body."""

    def moved(self, x: Array, *rows: Draw) -> Oracle | None:
        """The client at another x, for derivatives on these rows; None if that would gain nothing."""


def moved(c: Oracle, x: Array, *rows: Draw) -> tuple[Oracle, Array | None]:
    """An oracle and what its derivatives are given as `at`, for several derivatives at another x on these rows."""
    there = c.moved(x, *rows) if isinstance(c, Moving) else None
    return (c, x) if there is None else (there, None)


def hessian(c: Oracle, y: Array, u: Draw, at: Array | None = None) -> Callable[[Any], Any]:
    """The function v ↦ ∇²_y g_i(x, y; u) v, with one forward pass for all products."""
    if isinstance(c, OnePoint):
        return c.hessian(y, u, at)
    if not isinstance(y, Array):
        return lambda v: c.g_yy(y, v, u, at)
    return jax.linearize(lambda y: c.g_y(y, u, at=at), y)[1]


def hessian_matrices(c: Oracle, y: Array, u: Stream, at: Array | None = None) -> Any:
    """∇²_y g_i(x, y; u) as a matrix for each draw of u. On all rows there is one, as all draws are the same."""
    if isinstance(c, OnePoint):
        return c.hessian_matrices(y, u, at)

    def matrix(rows: Draw) -> Any:
        return _along_units(lambda e: c.g_yy(y, e, rows, at=at), y)

    if u.draws.index is None:
        return matrix(u.draws)[None]
    if isinstance(y, Array):
        return lax.map(matrix, u.draws)
    return np.stack([matrix(Draw(*pair)) for pair in zip(*u.draws[:2], strict=True)])


def mixed_matrix(c: Oracle, y: Array, chi: Draw, at: Array | None = None) -> Any:
    """∇_x∇_y g_i(x, y; χ) as a matrix, with a row for each component of x and a column for each of y."""
    if isinstance(c, OnePoint):
        return c.mixed_matrix(y, chi, at)
    return _along_units(lambda e: c.g_xy(y, e, chi, at=at), y).T


def _along_units(product: Callable[[Any], Any], y: Any) -> Any:
    """The products with all unit vectors, as the rows of a matrix."""
    if isinstance(y, Array):
        return lax.map(product, jnp.eye(y.size, dtype=y.dtype), batch_size=COLUMNS)
    return np.stack([product(e) for e in np.eye(y.size, dtype=y.dtype)])


class OwnOracle(Oracle, Protocol):
    """The oracle of a client with variables w of its own (`Problem.own`).

    f_w = ∇_w f_i    g_wy v = ∇_w∇_y g_i v

    All other derivatives are taken at the client's w too. `c.w` is a flat vector, padded as the client's rows are.
    """

    @property
    def w(self) -> Array:
        """The client's own variables, as a flat vector."""

    def f_w(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        """∇_w f_i(x, y; ξ)"""

    def g_wy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        """∇_w ⟨∇_y g_i(x, y; χ), v⟩"""


class LocalOracle(Oracle, Protocol):
    """The oracle of a client that has a lower solution of its own (`Problem.lower_is = "local"`)."""

    @property
    def y_start(self) -> Array:
        """The y that the problem starts from. The client knows it from the problem, so it is not sent."""

    def metrics(self, y: Array, names: tuple[str, ...], at: Array | None = None) -> Array:
        """The problem's metrics of these names at (x, y), on all test rows of the client."""


def own_y(c: LocalOracle, beta: Array | float, shared: bool, zeta: Stream, kept: bool) -> Array:
    """y_i ← y_i - β ∇_y g_i(x, y_i; ζ) along the draws, at the held x; `shared` divides β among the steps.

    The steps start from the y that the client has kept as its own, or from that of the problem.
    """
    start = c.own("y", c.y_start) if kept else c.y_start
    return sgd(c.g_y, start, beta / zeta.steps if shared else beta, zeta)


class PartArrays(NamedTuple):
    """A part of a client's data, padded to the capacity; only the first `rows` rows are real."""

    inputs: PyTree
    targets: PyTree
    rows: Any


class Arrays(NamedTuple):
    """A client's data as an engine holds it."""

    lower: PartArrays
    upper: PartArrays
    test: PartArrays | None = None

    @property
    def padded(self) -> ClientSize:
        """The numbers of rows of the two losses, with the padding."""
        return ClientSize(*(int(jax.tree.leaves(part)[0].shape[0]) for part in (self.lower, self.upper)))


class Kept(NamedTuple):
    """An `Own` field that a client has kept: whether it exists yet, and the arrays of its pytree.

    A batch of clients has one structure, so a client that has kept nothing has zeros here, and `known` is False.
    """

    known: Any
    leaves: tuple[Any, ...]


def recall(kept: Mapping[str, Kept], name: str, default: PyTree) -> PyTree:
    """The value kept under a name, in the structure of the default; the default if nothing is kept."""
    if name not in kept:
        return default
    known, stored = kept[name]
    leaves, tree = jax.tree.flatten(default)
    shapes = [np.shape(leaf) for leaf in leaves], [np.shape(leaf) for leaf in stored]
    if shapes[0] != shapes[1]:
        raise StepError(
            f"own {name!r} was kept with shapes {shapes[1]} and is asked for with {shapes[0]}; "
            "give the default the structure of what the step returns"
        )
    if not isinstance(known, Array):
        return jax.tree.unflatten(tree, stored) if known else default
    chosen = [jnp.where(known, s, jnp.asarray(d)) for s, d in zip(stored, leaves, strict=True)]
    return jax.tree.unflatten(tree, chosen)


class Shapes:
    """An oracle with the right shapes but without data, which tells the server what a step returns.

    The number of a client's own variables is not known here, and nothing that is sent depends on it.
    """

    def __init__(self, p: int, q: int, held: Mapping[str, Array]) -> None:
        self._x, self._y, self._held, self.w = jnp.zeros(p), jnp.zeros(q), held, jnp.zeros(1)
        self.asked: dict[str, tuple[jax.ShapeDtypeStruct, ...]] = {}

    @property
    def x(self) -> Array:
        return self._held["x"]

    @property
    def y(self) -> Array:
        return self._held["y"]

    @property
    def y_start(self) -> Array:
        return self._y

    def held(self, name: str) -> Array:
        return self._held[name]

    def metrics(self, y: Array, names: tuple[str, ...], at: Array | None = None) -> Array:
        return jnp.zeros(len(names))

    def own(self, name: str, default: PyTree) -> PyTree:
        default = jax.tree.map(jnp.asarray, default)
        self.asked[name] = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype) for a in jax.tree.leaves(default))
        return default

    def f(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return jnp.zeros(())

    def g(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        return jnp.zeros(())

    def f_x(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self._x

    def f_y(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self._y

    def g_y(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        return self._y

    def g_yy(self, y: Array, v: Array, u: Draw, at: Array | None = None) -> Array:
        return self._y

    def g_xy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        return self._x

    def g_x(self, y: Array, zeta: Draw, at: Array | None = None) -> Array:
        return self._x

    def f_w(self, y: Array, xi: Draw, at: Array | None = None) -> Array:
        return self.w

    def g_wy(self, y: Array, v: Array, chi: Draw, at: Array | None = None) -> Array:
        return self.w
