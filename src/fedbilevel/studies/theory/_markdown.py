"""The study as Markdown."""

from __future__ import annotations

from typing import Any

from ._estimator import NAMES
from ._lemmas import LEMMAS


def markdown(result: dict[str, Any]) -> str:
    estimator, convergence, orders = result["estimator"], result["convergence"], result["orders"]
    lines = ["# The theory, measured", "", "## Propositions 1 and 2", ""]
    lines += ["Measured / bound on 50 random quadratics, and on the hard case (N = 200).", ""]
    lines += ["| bound | median | worst of 50 | hard case | holds |", "|---|---|---|---|---|"]
    for name, text in NAMES.items():
        median, worst = estimator["median"][name], estimator["worst"][name]
        hard = estimator["hard"]["200"][name]
        holds = "yes" if max(worst, *(one[name] for one in estimator["hard"].values())) <= 1 else "NO"
        lines.append(f"| {text} | {median:.2g} | {worst:.2g} | {hard:.2g} | {holds} |")
    lines += _lemmas(result["lemmas"])
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


def _lemmas(data: dict[str, Any]) -> list[str]:
    """Both sides of the lemmas in some iterations of the run, and their ratios on the random quadratics."""
    lines = ["", "## Lemmas 1, 2 and 3", ""]
    lines += [
        f"A run of {data['K']} outer iterations with N = {data['N']}, τ = {data['tau']}, λ = {data['lam']:.4g}, "
        f"α = {data['alpha']:.4g} and β = {data['beta']:.4g}; every number is a mean over {data['repetitions']:,} "
        "repetitions. The right sides have the measured B^I; in brackets they have the bound of Proposition 1 "
        "instead, as the appendix restates the lemmas.",
        "",
    ]
    lines += ["| k | Lemma 1, left | right | Lemma 2, left | right | Lemma 3, left | right |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in [r for r in data["rows"] if r["k"] in (0, 1, 2, 5, 10, 20, 50, 100, 200, data["K"] - 1)]:
        lines.append(
            f"| {r['k']} | {r['descent_left']:.3g} | {r['descent_right']:.3g} ({r['descent_restated']:.3g}) | "
            f"{r['warm_start_left']:.3g} | {r['warm_start_right']:.3g} | "
            f"{r['drift_left']:.3g} | {r['drift_right']:.3g} ({r['drift_restated']:.3g}) |"
        )
    lines += [
        "",
        "Left / right over the run, and in one iteration on each of 50 random quadratics at the largest α of the "
        "theorem. The two gains of Lemma 1 are moved to its left side first, so that its right side is "
        "positive.",
        "",
        "| bound | worst of the run | median of 50 | worst of 50 | holds |",
        "|---|---|---|---|---|",
    ]
    for name, text in LEMMAS.items():
        worst, many = data["worst_of_run"][name], data["worst"][name]
        holds = "yes" if max(worst, many) <= 1 else "NO"
        lines.append(f"| {text} | {worst:.2g} | {data['median'][name]:.2g} | {many:.4g} | {holds} |")
    return lines
