"""The paper's theory beside measurement.

The estimator is compared with Propositions 1 and 2, runs are compared with Theorem 1, and the constants are
compared with the orders that Corollary 1 claims.

`run_theory(out, quick)` writes three figures, `theory.json` with every number and `theory.md` with the tables.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich.table import Table

from ..engines import Simulation
from ..problems.quadratic import Quadratic, QuadraticTask
from ..theory import Assumed, Constant, DerivedConstants, Given, Theory, assumed_entries
from .theory_figures import draw_convergence, draw_estimator, draw_orders
from .theory_measure import (
    Case,
    Dials,
    compare,
    dense_descent,
    federated_descent,
    hard_case,
    random_case,
    wide,
)

NAMES = {
    "bias": "Proposition 1: bias B^I",
    "variance": "Proposition 2: variance of h_i^I against σ_h²",
    "upper": "Proposition 2: upper direction against D_h²",
    "lower": "proof of Proposition 1: E‖y^t - y*‖², worst t",
}
TAU = 3  # the number of local steps at both levels in the convergence study


def run_theory(out: Path, quick: bool = False) -> dict[str, Any]:
    """Run the study into a folder and return all of its numbers."""
    out.mkdir(parents=True, exist_ok=True)
    begun = time.perf_counter()
    result: dict[str, Any] = {
        "estimator": estimator_study(quick),
        "convergence": convergence_study(quick),
        "orders": order_study(),
    }
    draw_estimator(result["estimator"], out / "theory-estimator")
    draw_convergence(result["convergence"], out / "theory-convergence")
    draw_orders(result["orders"], out / "theory-orders")
    result["quick"], result["seconds"] = quick, round(time.perf_counter() - begun, 1)
    (out / "theory.json").write_text(json.dumps(result, indent=1) + "\n")
    (out / "theory.md").write_text(_markdown(result))
    return result


def theory_table(
    constants: Assumed,
    N: int,
    lam: float,
    *,
    K: int = 10_000,
    alpha_bar: float = 1.0,
    beta: float | None = None,
    tau: int = 1,
) -> Table:
    """Make the table of the command line: every constant of the paper with its value, formula and place."""
    theory = Theory(constants, N, lam, K, alpha_bar, beta)
    title = f"The theory for N = {N}, λ = {lam:.4g}, K = {K:,}, ᾱ = {alpha_bar:.4g}"
    table = Table(title=title, title_justify="left")
    table.add_column("constant", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("formula")
    table.add_column("in the paper", style="dim")
    for group in (assumed_entries(constants), theory.entries()):
        for symbol, value, formula, place in group:
            table.add_row(symbol, f"{value:.4g}", formula, place)
        table.add_section()
    local = f"α_k / τ, τ = {tau}", f"β_k / τ, τ = {tau}"
    for symbol, value, formula in zip("αβ", (theory.alpha_k, theory.beta_k), local, strict=True):
        table.add_row(f"{symbol}_i", f"{value / tau:.4g}", formula, "Theorem 1")
    return table


def estimator_study(quick: bool) -> dict[str, Any]:
    """Measure bias and variance over N and over λ on one quadratic, on 50 random ones, and on a hard one."""
    trials = 100 if quick else 400
    task = Quadratic(size_x=6, size_y=5, condition=10.0, heterogeneity=1.0, noise=0.3).make(clients=8, seed=1)
    L_g = task.constants(0.0).L_g
    g = np.random.default_rng(0)
    x, y = g.normal(size=6), 2.0 * g.normal(size=5)

    def at(N: int, share: float) -> dict[str, float]:
        lam = share / L_g
        case = Case(task, x, y, Dials(N, lam, min(1.0, lam, 1 / (6 * L_g)), tau=4))
        rows, theory = compare(case, trials)
        gap = float(((y - task.solution(x)) ** 2).sum())
        found: dict[str, float] = {"N": N, "lam": lam, "lam_L_g": share, **theory.bias_bound(gap)._asdict()}
        for row in rows:
            found |= {f"{row.name}_measured": row.measured, f"{row.name}_bound": row.bound}
        return found

    lengths = sorted({round(n) for n in np.geomspace(1, 200, 10 if quick else 22)})
    shares = [float(s) for s in np.geomspace(0.01, 1.0, 9 if quick else 19)]
    noisy = [compare(random_case(seed), trials)[0] for seed in range(50)]
    hard = {N: compare(hard_case(N))[0] for N in (5, 20, 50, 200)}
    return {
        "kappa": L_g / task.constants(0.0).mu,
        "over_N": [at(n, 1.0) for n in lengths],
        "over_lam": [at(20, s) for s in shares],
        "random": [{row.name: [row.measured, row.bound, row.ratio] for row in rows} for rows in noisy],
        "worst": {name: max(r.ratio for rows in noisy for r in rows if r.name == name) for name in NAMES},
        "median": {
            name: float(np.median([r.ratio for rows in noisy for r in rows if r.name == name])) for name in NAMES
        },
        "hard": {str(N): {row.name: row.ratio for row in rows} for N, rows in hard.items()},
    }


def gentle_task() -> QuadraticTask:
    """Make a quadratic on which the theorem's small steps make progress within some thousand iterations.

    It has κ_g = 1.2 and a small upper loss.
    """
    made = Quadratic(size_x=4, size_y=3, condition=1.2, heterogeneity=0.5, noise=0.2).make(clients=4, seed=0)
    unit, small, half = np.eye(7, dtype=np.float32), np.float32(0.1), np.float32(0.5)
    return QuadraticTask(made.A, half * made.B, made.b, small * half * (made.J + unit), small * made.c)


def convergence_study(quick: bool) -> dict[str, Any]:
    """Measure 1/K Σ_k ||∇f(x_k)||² with the theorem's step sizes and compare it with the bound.

    Every K is a separate run, because the step sizes depend on K.
    """
    task, N = gentle_task(), 6
    engine = Simulation(task.problem, task.clients)
    lam = 0.25 / task.constants(0.0).L_g
    free = Theory(task.constants(1.0), N, lam)
    least = min(free.alpha_bar_1, free.alpha_bar_2, free.alpha_bar_3)
    alpha_bar = 10 * least  # The rule ᾱ/√K takes over at K = 100.
    start = _start(task, free)
    rows: list[dict[str, Any]] = []
    lengths = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000)[: 6 if quick else 8]
    longest = 30 if quick else 1000  # The federation runs no longer than this.
    for K in lengths:
        # With ρ = 0 the step sizes do not depend on the ball, so they are known before the run.
        theory = Theory(task.constants(1.0), N, lam, K, alpha_bar)
        runs = dense_descent(task, theory, TAU, K, seeds=8)
        own = federated_descent(task, engine, theory, TAU, K) if longest >= K else None
        radius = max(runs.radius, own.radius if own else 0.0)
        theory = Theory(task.constants(radius), N, lam, K, alpha_bar)
        bound, used = theory.convergence_bound(start), theory.convergence_bound(start, at_beta=True)
        rows.append(
            {
                "K": K,
                "alpha": theory.alpha_k,
                "beta": theory.beta_k,
                "radius": radius,
                "dense": float(runs.means.mean()),
                "dense_deviation": float(runs.means.std()),
                "federated": float(own.means[0]) if own else None,
                "bound": bound.total,
                "bound_at_beta": used.total,
                "dominant": bound.dominant,
                "terms": bound._asdict(),
            }
        )
    late = rows[-4:]
    return {
        "rows": rows,
        "start": start,
        "alpha_bar": alpha_bar,
        "N": N,
        "lam": lam,
        "slope_measured": _slope([r["K"] for r in late], [r["dense"] for r in late]),
        "slope_bound": _slope([r["K"] for r in late], [r["bound"] - r["terms"]["truncation"] for r in late]),
        "looseness": [r["bound"] / r["dense"] for r in rows],
    }


class Quantity(NamedTuple):
    """A quantity whose order in κ_g is fitted, beside the order that the paper claims for it.

    symbol   the name of the quantity in tables and figures
    claimed  the order for ρ > 0 and N = κ_g in the proof of Corollary 1, or None where the proof gives none
    value    the function that computes the quantity
    """

    symbol: str
    claimed: int | None
    value: Callable[[Theory], float]


def _quantities(epsilon: float) -> list[Quantity]:
    """List the constants, the terms of the bound at K = 1, and the numbers of iterations and rounds for ε."""
    constants: list[tuple[Constant[DerivedConstants], int | None]] = [
        (Theory.L_y, 1),
        (Theory.L_yx, 3),
        (Theory.M_f, 2),
        (Theory.L_f_prime, 3),
        (Theory.eta, 1),
        (Theory.sigma_h2, 2),
        (Theory.D_h2, None),
        (Theory.alpha_bar_1, -3),
        (Theory.alpha_bar_2, -4),
        (Theory.alpha_bar_3, -3),
        (Theory.beta_bar, 4),
        (Theory.c_0, 3),
        (Theory.c_1, 3),
        (Theory.c_2, 3),
        (Theory.c_3, 8),
    ]
    return [
        *(Quantity(constant.symbol, order, constant.value) for constant, order in constants),
        Quantity("start·K", 4, lambda t: t.convergence_bound(1.0).start),
        Quantity("tuned·√K", 4, lambda t: t.convergence_bound(1.0).tuned),
        Quantity("upper·√K", None, lambda t: t.convergence_bound(1.0).upper),
        Quantity("estimator·√K", None, lambda t: t.convergence_bound(1.0).estimator),
        Quantity("noise_f·√K", None, lambda t: t.convergence_bound(1.0).noise_f),
        Quantity("noise_g·√K", 4, lambda t: t.convergence_bound(1.0).noise_g),
        Quantity("K(ε)", 8, lambda t: t.iterations(1.0, epsilon, truncation=False)),
        Quantity("N·K(ε)", 9, lambda t: t.N * t.iterations(1.0, epsilon, truncation=False)),
    ]


def order_study() -> dict[str, Any]:
    """Fit the orders of the constants and of the bound in κ_g.

    The other quantities are L_g = L_f = M = σ = λ = W⁰ = 1, N = κ_g, ᾱ = κ_g^-4 and ε = 0.1.
    """
    epsilon = 0.1
    kappas = [float(k) for k in np.geomspace(10, 1e5, 33)]

    def theory(kappa: float, rho: float, N: int | None = None) -> Theory:
        given = Given(mu=1 / kappa, L_g=1.0, L_f=1.0, M=1.0, rho=rho, sigma_f=1.0, sigma_g=1.0)
        return Theory(given, N or math.ceil(kappa), 1.0, K=1, alpha_bar=kappa**-4)

    def enough(kappa: float) -> int:
        """Return an N for which the truncation is at most ε/2. It is of order κ log(κ/ε)."""
        return math.ceil(math.log(epsilon / (2 * 8 * kappa**2 * 4)) / (2 * math.log1p(-1 / kappa)))

    quantities = _quantities(epsilon)
    values = {q.symbol: [q.value(theory(k, 1.0)) for k in kappas] for q in quantities}
    zero = Theory.L_yx.symbol  # It is 0 when ρ = 0 and has no order then.
    plain = {q.symbol: [q.value(theory(k, 0.0)) for k in kappas] for q in quantities if q.symbol != zero}
    logged = [theory(k, 1.0, enough(k)) for k in kappas]
    values["K(ε), N = κ log"] = [t.iterations(1.0, epsilon) for t in logged]
    values["N·K(ε), N = κ log"] = [t.N * t.iterations(1.0, epsilon) for t in logged]
    claimed = {q.symbol: q.claimed for q in quantities}
    claimed |= {"K(ε), N = κ log": 8, "N·K(ε), N = κ log": 9}
    last = [i for i, k in enumerate(kappas) if k >= 999]
    chosen = [kappas[i] for i in last]
    return {
        "kappa": kappas,
        "values": values,
        "claimed": claimed,
        "fitted": {s: _slope(chosen, [v[i] for i in last]) for s, v in values.items()},
        "fitted_rho_0": {s: _slope(chosen, [v[i] for i in last]) for s, v in plain.items()},
        "truncation_at_N_kappa": [theory(k, 1.0).convergence_bound(1.0).truncation for k in kappas],
        "epsilon": epsilon,
    }


def _slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Fit the exponent of a power law: the slope of log value over log argument by least squares."""
    return float(np.polyfit(np.log(at), np.log(values), 1)[0])


def _start(task: QuadraticTask, theory: Theory) -> float:
    """Return W⁰ - inf f at x = 0, y = 0."""
    _, _, _, J, c = wide(task)

    def value(x: Any) -> float:
        z = np.concatenate([x, task.solution(x)])
        return float(0.5 * z @ J.mean(0) @ z + c.mean((0, 1)) @ z)

    zero = np.zeros(task.size_x)
    gap = float((task.solution(zero) ** 2).sum())
    return value(zero) - value(task.stationary_point) + theory.M_f / theory.L_y * gap


def _markdown(result: dict[str, Any]) -> str:
    estimator, convergence, orders = result["estimator"], result["convergence"], result["orders"]
    lines = ["# The theory, measured", "", "## Propositions 1 and 2", ""]
    lines += ["Measured / bound on 50 random quadratics, and on the hard case (N = 200).", ""]
    lines += ["| bound | median | worst of 50 | hard case | holds |", "|---|---|---|---|---|"]
    for name, text in NAMES.items():
        median, worst = estimator["median"][name], estimator["worst"][name]
        hard = estimator["hard"]["200"][name]
        holds = "yes" if max(worst, *(one[name] for one in estimator["hard"].values())) <= 1 else "NO"
        lines.append(f"| {text} | {median:.2g} | {worst:.2g} | {hard:.2g} | {holds} |")
    lines += ["", "## Theorem 1", ""]
    lines += [
        f"W⁰ - inf f = {convergence['start']:.4g}, N = {convergence['N']}, λ = {convergence['lam']:.4g}.",
        "",
    ]
    lines += ["| K | α_k | β_k | measured | by the federation | bound | bound / measured | largest term |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for r in convergence["rows"]:
        own = "" if r["federated"] is None else f"{r['federated']:.4g}"
        lines.append(
            f"| {r['K']:,} | {r['alpha']:.3g} | {r['beta']:.3g} | {r['dense']:.4g} | {own} | {r['bound']:.4g} | "
            f"{r['bound'] / r['dense']:.0f} | {r['dominant']} |"
        )
    lines += [
        "",
        f"Slope over the last four K: measured {convergence['slope_measured']:.2f}, bound without its constant "
        f"term {convergence['slope_bound']:.2f}; the paper: -0.5.",
    ]
    lines += ["", "## Corollary 1: orders in κ_g", "", "| quantity | claimed | fitted | fitted with ρ = 0 |"]
    lines += ["|---|---|---|---|"]
    for symbol, fitted in orders["fitted"].items():
        claim, plain = orders["claimed"][symbol], orders["fitted_rho_0"].get(symbol)
        lines.append(
            f"| {symbol} | {'' if claim is None else claim} | {fitted:.2f} | "
            f"{'' if plain is None else f'{plain:.2f}'} |"
        )
    return "\n".join(lines) + "\n"
