"""`diagnose`: the lower problem, the hypergradient and a method's estimate of it at a point, and values to set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array
from rich.console import Console
from rich.table import Table

from ..algorithms import Algorithm
from ..algorithms.local import ServerState, State
from ..data import Clients
from ..engines import ENGINES, Engine
from ..errors import SettingsError
from ..feasible import regions_of
from ..federation import Federation
from ..problem import BilevelProblem, lower_kind
from ..settings import choose, from_mapping
from ..spec import FederationSettings
from ..stepsizes import Automatic, Moves, Terms, automatic_settings, marks_of, with_values
from ._lanczos import Spectrum, Vector
from ._steps import Point
from ._truth import true_hypergradient
from ._upper import NOTED, fixed_step, upper_length
from ._values import (
    BIAS,
    Advice,
    advise,
    by_rounds,
    chosen_settings,
    measure_clients,
    moves_of,
    rounded,
    setting_that,
)


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` has found at a point. It prints as a table, and `draw` makes a picture of it.

    spectrum        mu and L_g of the mean lower loss, with their errors
    client_L        the largest L_g of a client, if the method's steps go along the clients' own losses
    local_L         the same on the rows of a local lower step
    hypergradient   h at the point, by conjugate gradients on full batches
    implicit        the part -∇_x∇_y g p of it
    estimates       the method's own estimates of h, a row for each draw
    advice          the present and the recommended values, each with its reason
    lam, terms      the step and the number of terms of the method's Neumann series; None if it has none
    solved          whether y was solved for. It was not if that was not wanted, or if the Newton steps failed
    lower_residual  ||∇_y g|| at the point
    residual        ||∇²_y g p - ∇_y f|| / ||∇_y f||
    rounds          what all of it has cost, the draws included
    """

    spectrum: Spectrum
    client_L: float | None
    local_L: float | None
    hypergradient: Vector
    implicit: Vector
    estimates: Vector
    advice: tuple[Advice, ...]
    lam: float | None
    terms: int | None
    solved: bool
    lower_residual: float
    residual: float
    rounds: int

    @cached_property
    def estimate(self) -> Vector:
        """The mean of the method's estimates."""
        return np.asarray(self.estimates.mean(0))

    @property
    def bias(self) -> float:
        """||mean of the estimates - h|| / ||h||"""
        return _ratio(self.estimate - self.hypergradient, self.hypergradient)

    @property
    def deviation(self) -> float:
        """sqrt(mean of ||estimate - mean||²) / ||h||"""
        apart = np.sqrt(((self.estimates - self.estimate) ** 2).sum(1).mean())
        return float(apart / max(float(np.linalg.norm(self.hypergradient)), 1e-30))

    @property
    def cosine(self) -> float:
        """The cosine of the angle between the mean of the estimates and h."""
        a, b = self.estimate, self.hypergradient
        return float(a @ b / max(float(np.linalg.norm(a) * np.linalg.norm(b)), 1e-30))

    @property
    def implicit_share(self) -> float:
        """How much of the implicit part the mean of the estimates has, along that part: 1 is all of it.

        NaN if h has no implicit part.
        """
        length = float(self.implicit @ self.implicit)
        direct = self.hypergradient - self.implicit
        return float((self.estimate - direct) @ self.implicit / length) if length > 0 else math.nan

    @property
    def recommended(self) -> dict[str, float]:
        """The recommended values by setting."""
        return {each.setting: each.recommended for each in self.advice}

    def table(self) -> Table:
        """What was found, one line for each figure, and the values to set below it."""
        table = Table("figure", "value", "meaning", title=f"Diagnosis at the point, {self.rounds} rounds")
        for row in self._figures():
            table.add_row(*row)
        table.add_section()
        for each in self.advice:
            table.add_row(f"algorithm.{each.setting}", f"{each.present:.3g} → {each.recommended:.3g}", each.why)
        return table

    def _figures(self) -> list[tuple[str, str, str]]:
        spectrum, where = self.spectrum, "solved for" if self.solved else "not at the solution"
        known = "exact" if spectrum.exact else f"after {spectrum.products} products"
        low = f"{spectrum.mu:.3g}" if spectrum.exact else f"≤ {spectrum.mu:.3g}"
        rows = [
            ("mu", low, f"smallest curvature of the mean lower loss; {known}, error {spectrum.mu_error:.2g}"),
            ("L_g", f"{spectrum.L_g:.3g}", f"largest curvature of it; {known}, error {spectrum.L_error:.2g}"),
            ("L_g / mu", f"{spectrum.condition:.3g}", "condition of the lower problem"),
        ]
        if self.client_L is not None:
            rows.append(("client L_g", f"{self.client_L:.3g}", "the largest of a client, up to a factor of 1.3"))
        if self.local_L is not None:
            rows.append(("local L_g", f"{self.local_L:.3g}", "the same on the rows of a local lower step"))
        size, part = np.linalg.norm(self.hypergradient), np.linalg.norm(self.implicit)
        rows += [
            ("||∇_y g||", f"{self.lower_residual:.2g}", f"at the point; y is {where}"),
            ("||h||", f"{size:.3g}", f"true hypergradient; residual of its system {self.residual:.2g}"),
            ("||implicit||", f"{part:.3g}", "the part of it that goes through y"),
            ("bias", f"{self.bias:.1%}", f"of the method's estimate, mean of {len(self.estimates)} draws"),
            ("deviation", f"{self.deviation:.1%}", "of one draw from their mean, relative to ||h||"),
            ("cosine", f"{self.cosine:.3f}", "between their mean and h"),
            ("implicit share", f"{self.implicit_share:.1%}", "of the implicit part that their mean has"),
        ]
        if self.lam is not None and self.terms is not None:
            left = spectrum.bias(self.lam, self.terms)
            rows.append(("series bias", f"{left:.1%}", f"that {self.terms} terms with {self.lam:g} leave in p"))
        return rows

    def to_mapping(self) -> dict[str, Any]:
        """The figures as JSON values."""
        names = ("bias", "deviation", "cosine", "implicit_share", "lower_residual", "residual", "rounds", "solved")
        spectrum = {name: getattr(self.spectrum, name) for name in ("mu", "L_g", "mu_error", "L_error", "exact")}
        made = spectrum | {name: getattr(self, name) for name in names}
        made |= {"client_L": self.client_L, "local_L": self.local_L}
        plain = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in made.items()}
        return plain | {"advice": [{**each._asdict(), "present": _plain(each.present)} for each in self.advice]}

    def draw(self, path: str | Path) -> None:
        """Draw the curvature, the bias against the number of terms, and the estimate beside the hypergradient."""
        from ._picture import draw_diagnosis  # Matplotlib takes half a second to import

        draw_diagnosis(self, Path(path))

    def __str__(self) -> str:
        console = Console(width=115, force_terminal=False)
        with console.capture() as captured:
            console.print(self.table())
        return captured.get()


def diagnose(
    problem: BilevelProblem,
    clients: Clients,
    algorithm: Algorithm,
    *,
    x: Array | None = None,
    y: Array | None = None,
    solve: bool = True,
    draws: int = 8,
    tolerance: float = 1e-4,
    products: int = 100,
    bias: float = BIAS,
    engine: Engine | Mapping[str, Any] | str | None = None,
    federation: FederationSettings | Mapping[str, Any] | None = None,
    seed: int = 0,
) -> Diagnosis:
    """Measure the lower problem and the hypergradient at a point, and compare a method's estimate with them.

    x, y        the flat vectors of the point (default: the parameters that the problem starts from)
    solve       whether y is replaced by the solution of the lower problem at x, by Newton steps. A method whose
                state has more than x and y, such as one without a server, is diagnosed at the given y
    draws       how often the method's estimate is drawn, each time by a whole outer iteration from the point
    tolerance   of the two linear systems
    products    the most Hessian products for one system; each is a round
    bias        the relative bias of p for which the length of the series is recommended

    Settings of the method that are "auto" have the recommended values in its estimates. Nothing is trained.
    """
    if isinstance(federation, FederationSettings):
        rules = federation
    else:
        rules = from_mapping(FederationSettings, federation or {}, "federation")
    if isinstance(engine, str | Mapping):
        rules = replace(rules, engine=choose(ENGINES, engine, "federation.engine"))
    if draws < 1:
        raise SettingsError(f"draws = {draws} is wrong: use at least 1")
    if lower_kind(problem) == "local":
        raise SettingsError(
            "lower_is = 'local' is set, and a diagnosis is of a lower level that clients share; compare with "
            "solve = 'anew' of local-lower and more steps instead"
        )
    with ExitStack() as stack:
        if engine is None or isinstance(engine, str | Mapping):
            engine = stack.enter_context(closing(rules.build(problem, clients)))
        fed = Federation(engine, seed=seed, cohorts=rules.cohort, weighting=rules.weighting)
        if regions_of(problem).y.project is not None:
            raise SettingsError("feasible_y is set, and a diagnosis does not know where y can move; remove it")
        start = algorithm.init(problem, clients.count)
        start = start._replace(**{name: v for name, v in (("x", x), ("y", y)) if v is not None})
        how: dict[str, Any] = dict(tolerance=tolerance, most=min(products, problem.size_y), seed=seed)
        asked = by_rounds(algorithm, fed)
        point = Point(asked[0], start.x, start.y, by_rounds=asked[1])
        solve = solve and isinstance(start, State | ServerState)
        truth = true_hypergradient(point, solve=solve, **how)
        point = point.moved(y=jnp.asarray(truth.y))
        found = measure_clients(point, algorithm, truth.measured.spectrum, seed)
        advice = advise(algorithm, found, clients.count, chosen_settings(algorithm), bias)
        if alpha := setting_that(algorithm, Moves.UPPER):
            value = rounded(fixed_step(point, truth, algorithm, **how))
            why = '1 over twice the curvature of f(x, y*(x)) along h; "auto" goes on from there'
            advice.append(Advice(alpha, getattr(algorithm, alpha), value, why))
        wanted = {each.setting: each.recommended for each in advice}
        method = with_values(algorithm, {name: wanted[name] for name in automatic_settings(algorithm)})
        state = start._replace(y=jnp.asarray(truth.y)) if solve else start
        estimates = [_estimate(fed, method, state) for _ in range(draws)]
        lam, terms = _series(method)
        return Diagnosis(
            spectrum=found.mean,
            client_L=found.client,
            local_L=found.local,
            hypergradient=truth.h,
            implicit=truth.implicit,
            estimates=np.stack(estimates),
            advice=tuple(advice),
            lam=lam,
            terms=terms,
            solved=truth.solved,
            lower_residual=truth.lower,
            residual=truth.residual,
            rounds=fed.ledger.rounds,
        )


def _estimate(fed: Federation, algorithm: Any, state: Any) -> Vector:
    """The method's hypergradient in one outer iteration from a state, or the direction in which it moves x."""
    fed.noted.clear()
    after = algorithm.step(fed, state)
    if NOTED in fed.noted:
        return np.asarray(fed.noted[NOTED], np.float64)
    alpha = setting_that(algorithm, Moves.UPPER)
    if alpha is None:
        raise SettingsError(
            f"{type(algorithm).__name__} notes no hypergradient_estimate, and has no upper step size with the "
            "marks Moves.UPPER and automatic; call fed.note(hypergradient_estimate=h) in its step"
        )
    moved = np.asarray(state.x, np.float64) - np.asarray(after.x, np.float64)
    return np.asarray(moved / (getattr(algorithm, alpha) * upper_length(algorithm)))


def _series(algorithm: Any) -> tuple[float | None, int | None]:
    """The step and the number of terms of a method's Neumann series."""
    lam = next((n for n in chosen_settings(algorithm) if moves_of(algorithm, n) is Moves.PRODUCT), None)
    for name in chosen_settings(algorithm):
        for mark in marks_of(algorithm, name):
            if isinstance(mark, Terms) and lam is not None:
                return getattr(algorithm, lam), getattr(algorithm, name) + mark.more
    return None, None


def _ratio(a: Vector, b: Vector) -> float:
    return float(np.linalg.norm(a) / max(float(np.linalg.norm(b)), 1e-30))


def _plain(value: float) -> float | str:
    return str(value) if isinstance(value, Automatic) else value
