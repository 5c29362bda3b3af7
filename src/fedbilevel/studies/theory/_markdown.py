"""The study as Markdown."""

from __future__ import annotations

from typing import Any

from ._estimator import NAMES


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
