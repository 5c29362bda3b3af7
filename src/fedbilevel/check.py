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
from ._derivatives import JaxOracle
from ._fitting import check_fit
from .data import ClientData, Clients, ClientSize, ListedClients
from .engines import native, pad
from .errors import SettingsError
from .feasible import Region, regions_of
from .oracle import Arrays, Kept
from .own import KEPT, own_part
from .problem import BilevelProblem, Fitting, Native, Problem
from .steps import Draw

Array = np.ndarray
ALL = Draw(None, None)
MOST = 20  # the most clients that are used, unless one is chosen
POINTS = 3  # how many points are tried before a derivative is called wrong
WITHIN = 16  # the points of a feasible set whose mean is compared at


@dataclass(frozen=True)
class Finding:
    """One comparison: the largest relative error found, at which client, and the largest that is allowed."""

    name: str
    compared_with: str
    error: float
    tolerance: float
    client: int | None = None

    @property
    def ok(self) -> bool:
        return bool(np.isfinite(self.error) and self.error <= self.tolerance)


@dataclass(frozen=True)
class Report:
    """All findings. The report prints as a table.

    clients      the clients whose data were used
    registered   the number of all clients
    """

    findings: tuple[Finding, ...]
    clients: tuple[int, ...] = (0,)
    registered: int = 1

    @property
    def ok(self) -> bool:
        return all(f.ok for f in self.findings)

    def table(self) -> Table:
        columns = ("derivative", "compared with", "relative error", "at client", "allowed", "")
        table = Table(*columns, title=f"fedbilevel.check, {self._whom}")
        for f in self.findings:
            verdict = "[green]ok[/]" if f.ok else "[red]WRONG[/]"
            where = "" if f.client is None else str(f.client)
            table.add_row(f.name, f.compared_with, f"{f.error:.1e}", where, f"{f.tolerance:.0e}", verdict)
        return table

    @property
    def _whom(self) -> str:
        if len(self.clients) == self.registered:
            return "the only client" if self.registered == 1 else f"all {self.registered} clients"
        chosen = ", ".join(map(str, self.clients))
        return f"{len(self.clients)} of {self.registered:,} clients: {chosen}"

    def __str__(self) -> str:
        console = Console(width=100)
        with console.capture() as capture:
            console.print(self.table())
        return capture.get()


def check(
    problem: BilevelProblem,
    data: ClientData | Clients,
    *,
    client: int | None = None,
    directions: int = 3,
    tolerance: float = 1e-2,
    seed: int = 0,
) -> Report:
    """Compare every derivative with finite differences on the clients' data, at a point near the start.

    All clients are used, or of more than twenty as many that are spread evenly; `client` chooses a single one. The
    report has the largest error of any of them, and names the client.

    The differences of the losses are in float64, so the remaining errors come from the float32 derivatives and
    from curvature. A kink (ReLU, abs) close to the point can make a difference wrong although the derivative is
    right, so a client at which something is wrong is compared again at another point, up to three times in all.
    What is wrong everywhere is not right.
    """
    if not isinstance(problem, Problem | Fitting):
        raise SettingsError("check compares derivatives with losses; give it a Problem or a TorchProblem")
    clients = ListedClients([data]) if isinstance(data, ClientData) else data
    chosen = _chosen(clients.count) if client is None else (client,)
    check_fit(problem, clients.load(chosen[0]))
    g = rng.generator(seed, "check")

    def point() -> tuple[Array, Array]:
        regions = regions_of(problem)
        return _near(problem.flat_x.vector, regions.x, g), _near(problem.flat_y.vector, regions.y, g)

    points = [point()]
    u, v = _units(directions, problem.size_x, g), _units(directions, problem.size_y, g)
    points += [point() for _ in range(POINTS - 1)]
    compare = _comparison(problem, points, u, v, tolerance, seed)
    largest = clients.capacity if len(chosen) > 1 else None
    found = list[list[Finding]]()
    for i in chosen:
        rows = clients.load(i)
        best = compare(0, i, rows, largest)
        for another in range(1, POINTS):
            if all(finding.ok for finding in best):
                break
            again = compare(another, i, rows, largest)
            best = [min(pair, key=lambda finding: finding.error) for pair in zip(best, again, strict=True)]
        found.append(best)
    worst = (max(each, key=lambda finding: (not finding.ok, finding.error)) for each in zip(*found, strict=True))
    return Report(tuple(worst), chosen, clients.count)


def _chosen(count: int) -> tuple[int, ...]:
    """All clients, or as many as are used at most, spread evenly."""
    return tuple(sorted({int(i) for i in np.linspace(0, count - 1, min(count, MOST))}))


class Point(NamedTuple):
    """Where the derivatives are compared: x and y, and the client's own variables, if there are any."""

    x: Any
    y: Any
    w: Any


def _comparison(
    problem: Any, points: list[tuple[Array, Array]], u: Array, v: Array, tolerance: float, seed: int
) -> Callable[[int, int, ClientData, ClientSize | None], list[Finding]]:
    """A function that compares everything at one of the points on a client's data, padded to the largest client.

    Clients then have arrays of one shape, and nothing is compiled twice.
    """
    turned_v, variables = np.roll(v, 1, axis=0), own_part(problem)
    loss = _own_loss if isinstance(problem, Fitting) else _loss
    derivatives = _derivatives if problem.traceable else _untraced_derivatives
    upper, lower = loss(problem, "upper"), loss(problem, "lower")
    stored, fresh = derivatives(problem, stored=True), derivatives(problem, stored=False)

    def first(value: Callable[[Array], float], at: Array, along: Array, e: float = 1e-4) -> list[float]:
        return [(value(at + e * d) - value(at - e * d)) / (2 * e) for d in along]

    def second(value: Callable[[Array, Array], float], pairs: list[tuple[Any, Any]]) -> list[float]:
        return [_second(value, a, b) for a, b in pairs]

    def compare(number: int, client: int, rows: ClientData, largest: ClientSize | None) -> list[Finding]:
        x, y = points[number]
        size = largest if largest and problem.traceable else ClientSize(rows.lower.rows, rows.upper.rows)
        wider = ClientSize(2 * size.lower + 1, 2 * size.upper + 1)
        padded = pad(rows, size)
        f, h = upper(padded), lower(padded)
        w = w_wide = along_w = np.zeros(0)
        if variables is not None:
            near = rng.generator(seed, "check", "own", client, number)
            w = _near(variables.start(size), Region(), near)
            along_w = _units(len(v), w.size, near)
            w_wide = variables.resized(w, size, wider)
        own, live = stored(Point(x, y, w), v, padded), fresh(Point(x, y, w), v, padded)
        wide = stored(Point(x, y, w_wide), v, pad(rows, wider)) if problem.traceable else own
        curved = second(lambda a, b: h(x, y + a + b, w), list(zip(v, turned_v, strict=True)))
        turned = _dots(np.roll(own.g_yy, 1, 0), v)
        against = "differences of the loss"
        compared = [
            ("f_y", against, v @ own.f_y, first(lambda a: f(x, a, w), y, v), own.f_y),
            ("g_y", against, v @ own.g_y, first(lambda a: h(x, a, w), y, v), own.g_y),
            ("g_yy", against, _dots(own.g_yy, turned_v), curved, own.g_yy[0]),
            ("g_yy symmetric", "its transpose", _dots(own.g_yy, turned_v), turned, own.g_yy[0]),
        ]
        if x.size:
            crossed = second(lambda a, b: h(x + b, y + a, w), list(zip(v, u, strict=True)))
            compared.insert(0, ("f_x", against, u @ own.f_x, first(lambda a: f(a, y, w), x, u), own.f_x))
            compared.insert(4, ("g_xy", against, _dots(own.g_xy, u), crossed, own.g_xy[0]))
        if variables is not None:
            crossed = second(lambda a, b: h(x, y + a, w + b), list(zip(v, along_w, strict=True)))
            slopes = first(lambda a: f(x, y, a), w, along_w)
            compared += [
                ("f_w", against, along_w @ own.f_w, slopes, own.f_w),
                ("g_wy", against, _dots(own.g_wy, along_w), crossed, own.g_wy[0]),
            ]
            narrow = [variables.resized(a, wider, size) for a in (wide.f_w, *wide.g_wy)]
            wide = wide._replace(f_w=narrow[0], g_wy=np.stack(narrow[1:]))
        found = [(name, other, _worst(got, expected, vector)) for name, other, got, expected, vector in compared]
        if problem.embed is not None:
            found.append(("stored embedding", "the live one", _apart(own, live)))
        if problem.traceable:  # otherwise rows are not padded
            found.append(("blind to padding", "twice the rows", _apart(own, wide)))
        return [Finding(name, other, error, tolerance, client) for name, other, error in found]

    return compare


class _Derivatives(NamedTuple):
    f_x: Any
    f_y: Any
    g_y: Any
    g_yy: Any
    g_xy: Any
    f_w: Any
    g_wy: Any


def _derivatives(problem: Any, stored: bool) -> Callable[[Point, Array, Arrays], _Derivatives]:
    """All derivatives of the oracle, computed in float32 as in a run, and returned as float64."""

    @jax.jit
    def compute(point: Point, v: Any, data: Arrays) -> _Derivatives:
        (x, y, _), memory = point, problem.remember(point.x, data) if stored else None
        held, kept = {"x": x, "y": y}, _kept(problem, point.w, data)
        own = isinstance(problem, Fitting)  # a problem whose upper rows are at the server has its upper loss here
        c = problem.oracle(held, data, memory, kept) if own else JaxOracle(problem, held, data, memory, kept)
        g_yy = jax.vmap(lambda d: c.g_yy(y, d, ALL))(v)
        g_xy = jax.lax.map(lambda d: c.g_xy(y, d, ALL), v)
        f_w, g_wy = jnp.zeros(0), jnp.zeros((len(v), 0))
        if c.w is not None:
            f_w, g_wy = c.f_w(y, ALL), jax.lax.map(lambda d: c.g_wy(y, d, ALL), v)
        return _Derivatives(c.f_x(y, ALL), c.f_y(y, ALL), c.g_y(y, ALL), g_yy, g_xy, f_w, g_wy)

    def derivatives(point: Point, v: Array, data: Arrays) -> _Derivatives:
        narrow = Point(*(jnp.asarray(a, jnp.float32) for a in point))
        made = compute(narrow, jnp.asarray(v, jnp.float32), data)
        return _Derivatives(*(np.asarray(a, np.float64) for a in made))

    return derivatives


def _untraced_derivatives(problem: Any, stored: bool) -> Callable[[Point, Array, Arrays], _Derivatives]:
    """The same for a problem that JAX cannot trace: its oracle is asked for one derivative after the other."""

    def derivatives(point: Point, v: Array, data: Arrays) -> _Derivatives:
        x, y, along = (native(problem, np.asarray(a, np.float32)) for a in (point.x, point.y, v))
        c = problem.oracle({"x": x, "y": y}, data, problem.remember(x, data) if stored else None, {})
        made = c.f_x(y, ALL), c.f_y(y, ALL), c.g_y(y, ALL)
        products = [[product(y, d, ALL) for d in along] for product in (c.g_yy, c.g_xy)]
        narrow = problem.from_native((made, products)) if isinstance(problem, Native) else (made, products)
        empty = np.zeros(0), np.zeros((len(v), 0))
        return _Derivatives(*(np.asarray(a, np.float64) for a in (*narrow[0], *narrow[1], *empty)))

    return derivatives


def _own_loss(problem: Fitting, level: str) -> Callable[[Arrays], Callable[[Array, Array, Array], float]]:
    """A loss in float64 as the problem computes it."""

    def on(data: Arrays) -> Callable[[Array, Array, Array], float]:
        wide = problem.wide_loss(level, data)
        return lambda x, y, w: wide(x, y)

    return on


def _kept(problem: Any, w: Any, data: Arrays) -> dict[str, Kept]:
    """The own variables w as a client would have kept them, so that the oracle is at w."""
    variables = own_part(problem)
    return {} if variables is None else {KEPT: Kept(True, variables.kept(w, data.padded, None))}


def _loss(problem: Problem, level: str) -> Callable[[Arrays], Callable[[Array, Array, Array], float]]:
    """A loss in float64, as a function of the data and then of x, y and w."""

    @jax.jit
    def compute(x: Any, y: Any, w: Any, data: Arrays) -> Any:
        c = JaxOracle(problem, {"x": x, "y": y}, data, None, _kept(problem, w, data))
        return c.f(y, ALL) if level == "upper" else c.g(y, ALL)

    def on(data: Arrays) -> Callable[[Array, Array, Array], float]:
        with jax.enable_x64(True):
            wide = jax.tree.map(_float64, data)

        def loss(x: Array, y: Array, w: Array) -> float:
            with jax.enable_x64(True):
                return float(compute(_float64(x), _float64(y), _float64(w), wide))

        return loss

    return on


def _near(start: Any, region: Region, g: np.random.Generator) -> Array:
    """A point near the start, so that zeros and symmetries of the start do not hide a mistake.

    In a feasible set it is the mean of several points of the set. That is in the interior if the set is convex, so
    that the losses need not be defined outside.
    """
    start = np.asarray(start, np.float32)
    spread = 0.1 * max(float(start.std()), 0.1) if start.size else 0.0

    def one() -> Array:
        return (start + spread * g.normal(size=start.size)).astype(np.float32)

    near = (
        one()
        if region.project is None
        else np.mean([region.nearest(jnp.asarray(one())) for _ in range(WITHIN)], axis=0)
    )
    return near.astype(np.float64)


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
