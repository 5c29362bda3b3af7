"""Whether a problem that was converted to JAX is still the same problem, tried on a few rows at the start.

First, a loss has to be a mean over rows, because that is how a converted loss is taken (see `_convert.py`). Then
its values and derivatives by JAX are compared with those by PyTorch, at the start and at a point near it. What
differs is refused, because a run would go on with the derivatives of another function.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import torch

from .._derivatives import JaxOracle, remember
from ..data import ClientData, ClientSize, Part
from ..engines import pad
from ..errors import SettingsError
from ..oracle import Arrays
from ..steps import Draw
from ._convert import OUT, Converted
from ._oracle import Losses, TorchOracle, rows_of
from ._oracle import remember as remember_by_torch
from ._parameters import computing, from_native, to_native, tree_map
from ._probing import called

PyTree = Any
ALL = Draw(None, None)
MANY, FEW = 32, 6  # rows on which the mean is tried, and rows on which derivatives are compared
ACCURACY = 3e-4  # the largest difference, relative to the length of PyTorch's vector; rounding makes about 1e-6
SMALL = 1e-3  # the length below which a vector counts as short, where rounding is relative to this
METRIC = 0.1  # the same for a metric, as rounding may change the class of a row
NEAR = 0.05  # how far the second point is from the start


class Values(NamedTuple):
    """The losses and their derivatives on all rows, at one point and along one v."""

    f: Any
    g: Any
    f_x: Any
    f_y: Any
    g_x: Any
    g_y: Any
    g_yy: Any
    g_xy: Any


def check_means(problem: Losses, name: str, part: Part) -> None:
    """Raise unless a function of the problem is a mean over rows: "lower", "upper" or "metrics"."""
    few = _some(part, MANY)
    inputs, targets = problem.tensors_of(few)
    groups = problem.body, problem.head
    parts = [(g, g.parts(to_native(near, g.device))) for g, near in zip(groups, _near(problem), strict=True)]

    def value(rows: slice) -> dict[str, float]:
        own = rows_of(problem, *(tree_map(lambda a: a[rows], tree) for tree in (inputs, targets)))
        if name == "metrics":
            return {f"metrics, {key}": float(v) for key, v in called(name, problem.measured, own).items()}
        return {name: float(called(name, problem.function(name), *(g.module for g in groups), own))}

    with torch.no_grad(), computing(*parts):
        together = value(slice(None))
        try:
            apart = [value(slice(row, row + 1)) for row in range(few.rows)]
        except SettingsError as error:
            raise SettingsError(
                f"{name} cannot be converted to JAX: it works on {few.rows} rows and not on one row alone, as a "
                f"converted function is taken: {error}; make it work, or {OUT}"
            ) from None
    for key, whole in together.items():
        mean = float(np.mean([each[key] for each in apart]))
        if np.isfinite(whole) and not abs(whole - mean) <= ACCURACY * (abs(whole) + SMALL):
            raise SettingsError(
                f"{key} cannot be converted to JAX: it is no mean over rows, but {whole:.6g} on {few.rows} rows "
                f"together, where the mean of their values is {mean:.6g}; take the mean() of a value for each "
                f"row, or {OUT}"
            )


def check_agreement(problem: Losses, converted: Converted, data: ClientData) -> None:
    """Raise unless JAX and PyTorch agree about the losses and all derivatives on a few rows."""
    rows = ClientData(_some(data.lower, FEW), _some(data.upper, FEW))
    for where, errors in differences(problem, converted, rows).items():
        for name, error in errors._asdict().items():
            if not error <= ACCURACY:
                raise SettingsError(
                    f"the problem cannot be converted to JAX: {where}, {name} by JAX differs from PyTorch's by "
                    f"{error:.1e} of its length on {rows.lower.rows} lower and {rows.upper.rows} upper rows "
                    f"(allowed: {ACCURACY:.0e}), as it may for no_grad or a backward pass of one's own; {OUT}"
                )


def check_metrics(problem: Losses, converted: Converted, test: Part) -> None:
    """Raise unless JAX and PyTorch agree about the metrics on some test rows."""
    rows = _some(test, MANY)
    inputs, targets = problem.tensors_of(rows)
    x, y = _near(problem)
    parts = [(g, g.parts(to_native(v, g.device))) for g, v in ((problem.body, x), (problem.head, y))]
    with torch.no_grad(), computing(*parts):
        made = problem.measured(rows_of(problem, inputs, targets))
    ours = jax.jit(converted.measure)(jnp.asarray(x), jnp.asarray(y), *rows)
    for name, value in {name: float(value) for name, value in made.items()}.items():
        if not _difference(ours[name], value) <= METRIC:
            raise SettingsError(
                f"metrics cannot be converted to JAX: {name} is {float(ours[name]):.6g} by JAX on {rows.rows} "
                f"rows, and {value:.6g} by PyTorch; {OUT}"
            )


def differences(problem: Losses, converted: Converted, rows: ClientData) -> dict[str, Values]:
    """How far JAX is from PyTorch at the start and near it, relative to the lengths of PyTorch's vectors.

    JAX is given the rows with some padding, as an engine would give them.
    """
    size = ClientSize(rows.lower.rows, rows.upper.rows)
    exact, padded = pad(rows, size), pad(rows, ClientSize(size.lower + 2, size.upper + 1))
    v = np.random.default_rng(1).standard_normal(problem.head.size).astype(np.float32)

    @jax.jit
    def by_jax(x: Any, y: Any, data: Arrays) -> Values:
        oracle = JaxOracle(converted, {"x": x, "y": y}, data, remember(converted, x, data))
        return _values(oracle, y, jnp.asarray(v))

    def by_torch(x: Any, y: Any) -> Values:
        x, y, along = (to_native(a.copy(), problem.head.device) for a in (x, y, v))
        oracle = TorchOracle(problem, {"x": x, "y": y}, exact, remember_by_torch(problem, x, exact), None)
        return _values(oracle, y, along)

    points = {"at the start": [problem.body.vector, problem.head.vector], "near the start": _near(problem)}
    return {
        where: Values(*map(_difference, by_jax(*map(jnp.asarray, at), padded), by_torch(*at)))
        for where, at in points.items()
    }


def _near(problem: Losses) -> list[np.ndarray]:
    """x and y near the start, since zeros and symmetries of the start may hide a mistake."""
    g, start = np.random.default_rng(0), [problem.body.vector, problem.head.vector]
    return [(a + NEAR * (a.std() + 0.1) * g.standard_normal(a.size)).astype(np.float32) for a in start]


def _values(c: Any, y: Any, v: Any) -> Values:
    return Values(
        c.f(y, ALL),
        c.g(y, ALL),
        c.f_x(y, ALL),
        c.f_y(y, ALL),
        c.g_x(y, ALL),
        c.g_y(y, ALL),
        c.g_yy(y, v, ALL),
        c.g_xy(y, v, ALL),
    )


def _difference(ours: Any, theirs: Any) -> float:
    """The distance relative to the length of PyTorch's vector; zero where PyTorch's own is not finite."""
    ours, theirs = np.asarray(ours), np.asarray(from_native(theirs))
    if not np.isfinite(theirs).all():
        return 0.0
    return float(np.linalg.norm(ours - theirs) / (np.linalg.norm(theirs) + SMALL))


def _some(part: Part, most: int) -> Part:
    """Some rows of a part, spread evenly, as rows that are next to each other are often alike."""
    chosen = np.unique(np.linspace(0, part.rows - 1, min(most, part.rows)).astype(int))
    return Part(*jax.tree.map(lambda a: np.asarray(a)[chosen], tuple(part)))
