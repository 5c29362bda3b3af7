"""Feasible sets for x and y, as projections.

A set is a function from a pytree of parameters to the nearest pytree in the set. So a function of the user's is a
set too, and may apply those of this module to parts of its pytree:

    Problem(..., feasible_x=Box(low=0.0))
    Problem(..., feasible_x=lambda x: {**x, "weights": Simplex()(x["weights"])})

The server projects; clients never do. The hypergradient of a problem whose y is at the boundary of its set needs
more than the projection, namely the directions in which y* can move when x changes. A set that knows them has the
method `tangent`. `Region` is such a set for flat vectors, which is what algorithms see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple, Protocol, runtime_checkable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from jax.flatten_util import ravel_pytree

from .errors import SettingsError, one_line
from .names import users_code
from .settings import Positive, about, settings

PyTree = Any
Projection = Callable[[Any], Any]
SAME = 1e-4  # A projection of a projection may differ from it by this share, for rounding.


@runtime_checkable
class Tangent(Protocol):
    """A set that knows the directions in which a point of it can move."""

    def tangent(self, point: PyTree, direction: PyTree) -> PyTree:
        """The part of a direction along which the point can move: its projection onto the face's tangent space.

        It is exact for sets with flat faces, where the point stays on its face if x changes a little. That is so
        under strict complementarity: the gradient of g pushes against every bound that the point is at.
        """


@dataclass(frozen=True)
class Box:
    """All pytrees whose numbers lie between bounds: low ≤ v ≤ high.

    low, high   a number; or a pytree of the structure of the parameters, or of the upper part of it, whose leaves
                are numbers or arrays that broadcast; None, also as a leaf, means no bound. `Box(low=0.0)` has
                the numbers that are not negative
    """

    low: PyTree = None
    high: PyTree = None

    def __call__(self, tree: PyTree) -> PyTree:
        """Clip every number to its bounds."""
        parameters, rest = eqx.partition(tree, eqx.is_inexact_array)
        return eqx.combine(optax.projections.projection_box(parameters, *self._bounds(parameters)), rest)

    def tangent(self, point: PyTree, direction: PyTree) -> PyTree:
        """The direction without the coordinates in which the point is at a bound: they do not move."""
        parameters, along = (eqx.filter(tree, eqx.is_inexact_array) for tree in (point, direction))

        def free(v: Array, low: Any, high: Any, d: Array) -> Array:
            return jnp.where((v > low) & (v < high), d, 0.0)

        return jax.tree.map(free, parameters, *self._bounds(parameters), along)

    def _bounds(self, parameters: PyTree) -> tuple[PyTree, PyTree]:
        low, high = _spread(self.low, parameters, -np.inf, "low"), _spread(self.high, parameters, np.inf, "high")
        pairs = zip(jax.tree.leaves(low), jax.tree.leaves(high), strict=True)
        if not all((a <= b).all() for a, b in pairs):
            raise SettingsError("Box is empty: a number of low is above the one of high, or is NaN; exchange them")
        return low, high


def _spread(bound: PyTree, parameters: PyTree, default: float, name: str) -> PyTree:
    """A bound for each number of the parameters. The result is concrete, also while JAX traces."""

    def beneath(own: Any, part: PyTree) -> PyTree:
        value = np.asarray(default if own is None else own, np.float32)
        return jax.tree.map(lambda v: np.broadcast_to(value, v.shape), part)

    try:
        return jax.tree.map(beneath, bound, parameters, is_leaf=lambda node: node is None)
    except (ValueError, TypeError) as error:
        raise SettingsError(
            f"Box.{name} does not fit the parameters ({one_line(str(error))}); give a number, or numbers and "
            "arrays in their structure"
        ) from None


@settings
class Simplex:
    """All pytrees whose numbers are not negative and have a given sum, over all arrays together."""

    total: Annotated[Positive, about("the sum of the numbers")] = 1.0

    def __call__(self, tree: PyTree) -> PyTree:
        """The nearest pytree of the simplex."""
        parameters, rest = eqx.partition(tree, eqx.is_inexact_array)
        return eqx.combine(optax.projections.projection_simplex(parameters, self.total), rest)

    def tangent(self, point: PyTree, direction: PyTree) -> PyTree:
        """The direction on the face of the point: zero where the point is zero, and a sum of zero elsewhere."""
        parameters, along = (eqx.filter(tree, eqx.is_inexact_array) for tree in (point, direction))
        v, (d, restore) = ravel_pytree(parameters)[0], ravel_pytree(along)
        free = v > 0
        return restore(jnp.where(free, d - jnp.sum(jnp.where(free, d, 0.0)) / jnp.sum(free), 0.0))


@settings
class Ball:
    """All pytrees whose norm, over all arrays together, is at most a radius.

    It has no `tangent`: at its curved boundary the hypergradient also depends on the multiplier of the constraint.
    """

    radius: Annotated[Positive, about("the largest norm")] = 1.0

    def __call__(self, tree: PyTree) -> PyTree:
        """The nearest pytree of the ball."""
        parameters, rest = eqx.partition(tree, eqx.is_inexact_array)
        return eqx.combine(optax.projections.projection_l2_ball(parameters, self.radius), rest)


@dataclass(frozen=True)
class Region:
    """A feasible set for a flat vector, as algorithms see it.

    project   the nearest vector of the set; None if the vector is not bound
    tangent   tangent(y, v) is the part of v along which y can move; None if the set does not know it
    """

    project: Callable[[Array], Array] | None = None
    tangent: Callable[[Array, Array], Array] | None = None

    def nearest(self, v: Array) -> Array:
        """The nearest vector of the set, or the vector itself if it is not bound."""
        return v if self.project is None else self.project(v)

    def along(self, y: Array, v: Array) -> Array:
        """The part of v along which y can move, or v itself where that is not known."""
        return v if self.tangent is None else self.tangent(y, v)


class Regions(NamedTuple):
    """The feasible sets of a problem. By default neither x nor y is bound."""

    x: Region = Region()
    y: Region = Region()


@runtime_checkable
class Constrained(Protocol):
    """A problem with feasible sets. A problem of another library needs none, and then is not bound."""

    @property
    def regions(self) -> Regions:
        """The feasible sets of x and y."""


def regions_of(problem: Any) -> Regions:
    """The feasible sets of any problem."""
    regions: Regions | None = getattr(problem, "regions", None)
    return Regions() if regions is None else regions


def region(given: Projection | None, restore: Callable[[Array], PyTree]) -> Region:
    """The set for flat vectors. `restore` gives the user's pytree of a vector."""
    if given is None:
        return Region()
    projection, known = given, given if isinstance(given, Tangent) else None

    def tangent(y: Array, v: Array) -> Array:
        assert known is not None
        return _ravelled(known.tangent(restore(y), restore(v)))

    projected = jax.jit(lambda v: _ravelled(projection(restore(v))))
    return Region(projected, None if known is None else jax.jit(tangent))


def start_within(given: Projection | None, vector: Array, restore: Callable[[Array], PyTree], name: str) -> Array:
    """The start in the set. Raises if what is given is not a projection, and names the field of the problem."""
    if given is None:
        return vector
    if not callable(given):
        raise SettingsError(
            f"{name} is of type {type(given).__name__}; give fb.Box, fb.Simplex, fb.Ball, or a function that "
            "projects a pytree"
        )
    project = region(given, restore).nearest
    with users_code(f"{name} raises "):
        shape = jax.eval_shape(project, vector).shape
        if shape != vector.shape:
            raise SettingsError(
                f"{name} returns {_count(shape)}, and was given {_count(vector.shape)}; return a pytree of the "
                "same structure"
            )
        once = project(vector)
        twice = project(once)
    if not np.isfinite(once).all():
        raise SettingsError(f"{name} gives a number that is not finite at the start; start in the set")
    if float(jnp.linalg.norm(twice - once)) > SAME * (1 + float(jnp.linalg.norm(once))):
        raise SettingsError(
            f"{name} is not a projection: what it returns for the start is changed when it is projected again; "
            "return the nearest point of the set"
        )
    return once


def _ravelled(tree: PyTree) -> Array:
    return ravel_pytree(eqx.filter(tree, eqx.is_inexact_array))[0].astype(jnp.float32)


def _count(shape: tuple[int, ...]) -> str:
    size = int(np.prod(shape))
    return f"{size} floating-point numbers" if size != 1 else "one floating-point number"
