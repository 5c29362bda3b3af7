"""Whether the functions of a problem fit the data, found by abstract evaluation: no data, no arithmetic.

A shape that does not fit is then one line at the start that names the function and what it was given, and no trace
from inside of a compiled program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from .batch import Batch
from .data import ClientData, ClientSize, Part
from .errors import FedBilevelError, SettingsError, one_line
from .problem import BilevelProblem, Fitting, Problem

PyTree = Any


def check_fit(problem: BilevelProblem, data: ClientData, test: Part | None = None) -> None:
    """Raise unless the losses and `embed` fit the data of a client, and the metrics fit the test rows.

    A problem of another library tries its functions by itself, if it can.
    """
    if isinstance(problem, Fitting):
        problem.check_fit(data, test)
    if not isinstance(problem, Problem):
        return
    x, y = problem.flat_x.vector, problem.flat_y.vector
    for level, part in {"lower": data.lower, "upper": data.upper}.items():
        batch = _batch(problem, part, f"the {level} rows of a client")
        own = _own(problem, data)

        def loss(x: Any, y: Any, b: Batch, level: str = level, own: PyTree = own) -> Any:
            return problem.loss(level, x, y, b._replace(own=own))

        _check_loss(level, _evaluated(level, problem, batch, partial(jax.eval_shape, loss, x, y), own))
    for rows in (test, data.test):
        if rows is not None:
            metric_names(problem, rows)


def metric_names(problem: BilevelProblem, test: Part) -> tuple[str, ...]:
    """The names of the problem's metrics; raises unless they fit the test rows and are single numbers."""
    if isinstance(problem, Fitting):
        return problem.metric_names(test)
    if not isinstance(problem, Problem) or problem.metrics is None:
        return ()
    x, y = problem.flat_x.vector, problem.flat_y.vector
    batch = _batch(problem, test, "the test rows")
    made = _evaluated("metrics", problem, batch, partial(jax.eval_shape, problem.measured, x, y))
    _check_metrics(made)
    return tuple(made)


def _batch(problem: Problem, part: Part, whose: str) -> Batch:
    """The rows as shapes, with the features that `embed` makes of them."""
    inputs, targets = jax.tree.map(_struct, tuple(part))
    weights: Any = jax.ShapeDtypeStruct((part.rows,), jnp.float32)
    ids: Any = jax.ShapeDtypeStruct((part.rows,), jnp.int32)
    if problem.embed is None:
        return Batch(inputs, targets, weights, inputs, ids=ids)
    try:
        features = jax.eval_shape(problem.features, problem.flat_x.vector, inputs)
    except FedBilevelError:
        raise
    except Exception as error:
        given = f"x {_shapes(problem.x)} and inputs {_shapes(inputs)}, {whose}"
        raise _failure("embed", error, given) from error
    return Batch(inputs, targets, weights, features, ids=ids)


def _own(problem: Problem, data: ClientData) -> PyTree:
    """The own variables of a client with these data, as the losses see them."""
    part, rows = problem.own_part, ClientSize(data.lower.rows, data.upper.rows)
    return None if part is None else part.restore(jnp.asarray(part.start(rows)), rows)


def _struct(a: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(a.shape, jax.dtypes.canonicalize_dtype(a.dtype))


def _evaluated(
    name: str, problem: Problem, batch: Batch, evaluate: Callable[[Batch], Any], own: PyTree = None
) -> Any:
    """What a function of the user returns, or an error that says what it was given."""
    try:
        return evaluate(batch)
    except FedBilevelError:
        raise
    except Exception as error:
        rows = [f"{field} {_shapes(getattr(batch, field))}" for field in ("inputs", "targets")]
        rows += [f"own {_shapes(own)}"] if own is not None else []
        rows += [f"features {_shapes(batch.features)}"] if problem.embed is not None else []
        given = f"x {_shapes(problem.x)}, y {_shapes(problem.y)} and a batch of {', '.join(rows)}"
        raise _failure(name, error, given) from error


def _failure(name: str, error: Exception, given: str) -> SettingsError:
    why = one_line(str(error).splitlines()[0] if str(error) else "no reason", 200).rstrip(".")
    return SettingsError(f"{name} fails with {type(error).__name__}: {why}; it was given {given}")


def _check_loss(level: str, made: Any) -> None:
    if not isinstance(made, jax.ShapeDtypeStruct):
        raise SettingsError(f"{level} returns an object of type {type(made).__name__}; return one number")
    if made.shape:
        raise SettingsError(
            f"{level} returns an array of shape {made.shape}, and a loss is one number; "
            "average over the rows with b.mean(...)"
        )
    if not jnp.issubdtype(made.dtype, jnp.floating):
        raise SettingsError(f"{level} returns a number of type {made.dtype}; return a floating-point number")


def _check_metrics(made: Any) -> None:
    if not isinstance(made, Mapping):
        raise SettingsError(
            f"metrics returns an object of type {type(made).__name__}; return numbers by name, as in "
            "{'test_accuracy': b.mean(...)}"
        )
    for name, value in made.items():
        if getattr(value, "shape", None) != ():
            found = f"an array of shape {value.shape}" if hasattr(value, "shape") else f"a {type(value).__name__}"
            raise SettingsError(f"metrics returns {found} for {name}; return one number for each name")


def _shapes(tree: PyTree) -> str:
    """The shapes of a pytree: of an array its own, of other trees a list with one for each array."""
    if tree is None:
        return "None"
    found = [tuple(leaf.shape) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "shape")]
    return one_line(str(found[0] if hasattr(tree, "shape") else found), 100)
