"""`check(problem, data)` tests whether every derivative of a new problem agrees with its losses.

It is the first tool for the user's own problem. Each derivative that the oracle gives is compared with central
finite differences of the losses along random directions. g_yy is tested for symmetry, the stored embedding is
compared with a fresh one, and the losses must not depend on padding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from . import rng
from ._derivatives import JaxOracle, remember
from .data import ClientData, Clients, ClientSize
from .engines import pad
from .errors import SettingsError
from .oracle import Arrays
from .problem import BilevelProblem, Problem
from .steps import Draw

Array = np.ndarray
ALL = Draw(None, None)


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest relative error found, and the largest that is allowed."""

    name: str
    compared_with: str
    error: float
    tolerance: float

    @property
    def ok(self) -> bool:
        return bool(np.isfinite(self.error) and self.error <= self.tolerance)


@dataclass(frozen=True)
class Report:
    """All findings. The report prints as a table."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return all(f.ok for f in self.findings)

    def table(self) -> Table:
        table = Table("derivative", "compared with", "relative error", "allowed", "", title="fedbilevel.check")
        for f in self.findings:
            verdict = "[green]ok[/]" if f.ok else "[red]WRONG[/]"
            table.add_row(f.name, f.compared_with, f"{f.error:.1e}", f"{f.tolerance:.0e}", verdict)
        return table

    def __str__(self) -> str:
        console = Console(width=100)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def check(
    problem: BilevelProblem,
    data: ClientData | Clients,
    *,
    client: int = 0,
    directions: int = 3,
    tolerance: float = 1e-2,
    seed: int = 0,
) -> Report:
    """Compare every derivative with finite differences on one client's data, at a point near the start.

    The differences of the losses are in float64, so the remaining errors come from the float32 derivatives and
    from curvature. A kink (ReLU, abs) close to the point can make a difference wrong although the derivative is
    right.
    """
    if not isinstance(problem, Problem):
        raise SettingsError("check compares derivatives by JAX with their losses; give it a Problem")
    rows = data if isinstance(data, ClientData) else data.load(client)
    size = ClientSize(rows.lower.rows, rows.upper.rows)
    g = rng.generator(seed, "check")
    x, y = _near(problem.flat_x.vector, g), _near(problem.flat_y.vector, g)
    u = _units(directions, problem.size_x, g)
    v = _units(directions, problem.size_y, g)
    w = np.roll(v, 1, axis=0)
    f, h = _loss(problem, "upper", pad(rows, size)), _loss(problem, "lower", pad(rows, size))

    own = _derivatives(problem, x, y, v, pad(rows, size), stored=True)
    live = _derivatives(problem, x, y, v, pad(rows, size), stored=False)
    wide = _derivatives(problem, x, y, v, pad(rows, ClientSize(2 * size.lower + 1, 2 * size.upper + 1)), True)

    def first(value: Callable[[Array], float], at: Array, along: Array, e: float = 1e-4) -> list[float]:
        return [(value(at + e * d) - value(at - e * d)) / (2 * e) for d in along]

    def second(value: Callable[[Array, Array], float], pairs: list[tuple[Any, Any]]) -> list[float]:
        return [_second(value, a, b) for a, b in pairs]

    differences = "differences of the loss"
    lower_pairs, mixed_pairs = list(zip(v, w, strict=True)), list(zip(v, u, strict=True))
    compared = [
        ("f_x", differences, u @ own.f_x, first(lambda a: f(a, y), x, u), own.f_x),
        ("f_y", differences, v @ own.f_y, first(lambda a: f(x, a), y, v), own.f_y),
        ("g_y", differences, v @ own.g_y, first(lambda a: h(x, a), y, v), own.g_y),
        (
            "g_yy",
            differences,
            _dots(own.g_yy, w),
            second(lambda a, b: h(x, y + a + b), lower_pairs),
            own.g_yy[0],
        ),
        (
            "g_xy",
            differences,
            _dots(own.g_xy, u),
            second(lambda a, b: h(x + b, y + a), mixed_pairs),
            own.g_xy[0],
        ),
        (
            "g_yy symmetric",
            "its transpose",
            _dots(own.g_yy, w),
            _dots(np.roll(own.g_yy, 1, 0), v),
            own.g_yy[0],
        ),
    ]
    found = [
        Finding(name, against, _worst(got, expected, vector), tolerance)
        for name, against, got, expected, vector in compared
    ]
    if problem.embed is not None:
        found.append(Finding("stored embedding", "the live one", _apart(own, live), tolerance))
    found.append(Finding("blind to padding", "twice the rows", _apart(own, wide), tolerance))
    return Report(tuple(found))


class _Derivatives(NamedTuple):
    f_x: Any
    f_y: Any
    g_y: Any
    g_yy: Any
    g_xy: Any


def _derivatives(problem: Problem, x: Array, y: Array, v: Array, data: Arrays, stored: bool) -> _Derivatives:
    """All derivatives of the oracle, computed in float32 as in a run, and returned as float64."""

    @jax.jit
    def compute(x: Any, y: Any, v: Any, data: Arrays) -> _Derivatives:
        c = JaxOracle(problem, {"x": x, "y": y}, data, remember(problem, x, data) if stored else None)
        g_yy = jax.vmap(lambda d: c.g_yy(y, d, ALL))(v)
        g_xy = jax.lax.map(lambda d: c.g_xy(y, d, ALL), v)
        return _Derivatives(c.f_x(y, ALL), c.f_y(y, ALL), c.g_y(y, ALL), g_yy, g_xy)

    made = compute(*(jnp.asarray(a, jnp.float32) for a in (x, y, v)), data)
    return _Derivatives(*(np.asarray(a, np.float64) for a in made))


def _loss(problem: Problem, level: str, data: Arrays) -> Callable[[Array, Array], float]:
    """A loss in float64."""

    @jax.jit
    def compute(x: Any, y: Any, data: Arrays) -> Any:
        c = JaxOracle(problem, {"x": x, "y": y}, data)
        return c.f(y, ALL) if level == "upper" else c.g(y, ALL)

    with jax.enable_x64(True):
        wide = jax.tree.map(_float64, data)

    def loss(x: Array, y: Array) -> float:
        with jax.enable_x64(True):
            return float(compute(_float64(x), _float64(y), wide))

    return loss


def _near(start: Any, g: np.random.Generator) -> Array:
    """A point near the start, so that zeros and symmetries of the start do not hide a mistake."""
    start = np.asarray(start, np.float32)
    spread = 0.1 * max(float(start.std()), 0.1)
    return (start + spread * g.normal(size=start.size)).astype(np.float32).astype(np.float64)


def _units(count: int, size: int, g: np.random.Generator) -> Array:
    v = g.normal(size=(count, size))
    return v / np.linalg.norm(v, axis=1, keepdims=True)


def _float64(a: Any) -> Any:
    a = np.asarray(a)
    return jnp.asarray(a, jnp.float64) if np.issubdtype(a.dtype, np.floating) else jnp.asarray(a)


def _second(value: Callable[[Array, Array], float], a: Array, b: Array, e: float = 1e-4) -> float:
    """∂²/∂s∂t of value(s a, t b) at zero."""
    a, b = e * a, e * b
    return (value(a, b) - value(a, -b) - value(-a, b) + value(-a, -b)) / (4 * e * e)


def _dots(a: Array, b: Array) -> Array:
    return np.einsum("ij,ij->i", a, b)


def _worst(got: Any, expected: Any, vector: Array) -> float:
    """The largest error relative to the number, or to a typical component if the number is small."""
    got, expected = np.asarray(got), np.asarray(expected)
    typical = np.linalg.norm(vector) / np.sqrt(vector.size)
    return float(np.max(np.abs(got - expected) / np.maximum(np.maximum(np.abs(expected), typical), 1e-12)))


def _apart(one: _Derivatives, other: _Derivatives) -> float:
    pairs = zip(one, other, strict=True)
    return max(float(np.linalg.norm(a - b) / (np.linalg.norm(a) + 1e-12)) for a, b in pairs)
