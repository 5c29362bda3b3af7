"""The table of `fedbilevel theory`: every constant of the paper with its value, formula and place."""

from __future__ import annotations

from rich.table import Table

from ...theory import Assumed, Theory, assumed_entries


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
