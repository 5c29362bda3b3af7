"""The figures of the theory study, drawn from its numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...report import INK, MARK, canvas

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GREY, GREEN, SAND, VIOLET = "#8a8a8a", "#3b7d4f", "#c08a2b", "#6d4c91"
TERMS = {  # the terms of Proposition 1 that are not zero when ρ = 0
    "start_source": (GREEN, "its term of $\\nabla_y f$ at early $y^Q$"),
    "truncation": (SAND, "its term of the series that ends at N"),
    "drift_source": (VIOLET, "its term of noise and client drift"),
}


def draw_estimator(data: dict[str, Any], stem: Path) -> None:
    """Draw the measured bias and variance against Propositions 1 and 2, over N and over λ."""
    figure = _figure(10, 7)
    grid = figure.subplots(2, 2)
    for column, (key, field, label) in enumerate(
        [("over_N", "N", "N, the lower rounds (λ = 1/$L_g$)"), ("over_lam", "lam_L_g", "λ$L_g$ (N = 20)")]
    ):
        rows = data[key]
        at = [r[field] for r in rows]
        for axes, name, text, bound in (
            (grid[0][column], "bias", "squared bias of $h^I$", "bound of Proposition 1"),
            (
                grid[1][column],
                "variance",
                "variance of $h_i^I$, largest client",
                "bound $\\sigma_h^2$ of Proposition 2",
            ),
        ):
            axes.plot(at, [r[f"{name}_bound"] for r in rows], color=MARK, linewidth=1.8, label=bound)
            axes.plot(at, [r[f"{name}_measured"] for r in rows], "o-", color=INK, markersize=3, label="measured")
            if name == "bias":
                for term, (colour, meaning) in TERMS.items():
                    axes.plot(at, [r[term] for r in rows], "--", color=colour, linewidth=1, label=meaning)
                top = max(r["bias_bound"] for r in rows)
                axes.set_ylim(min(r["bias_measured"] for r in rows) / 100, top * 5)
            axes.set(xscale="log", yscale="log", ylabel=text)
            _plain(axes)
        grid[1][column].set_xlabel(label)
    grid[0][1].legend(fontsize=8, frameon=False, loc="lower left")
    grid[1][0].legend(fontsize=8, frameon=False, loc="upper left")
    figure.suptitle(
        f"The AggITD estimator on a noisy quadratic, 8 clients, $\\kappa_g$ = {data['kappa']:.1f}; Q enumerated\n"
        f"50 random quadratics: measured at most {data['worst']['bias']:.2g} of the bias bound and "
        f"{data['worst']['variance']:.2g} of the variance bound; "
        f"hard case: {data['hard']['200']['bias']:.2g} and {data['hard']['200']['variance']:.2g}",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _save(figure, stem)


def draw_convergence(data: dict[str, Any], stem: Path) -> None:
    """Draw the mean squared hypergradient over K with the theorem's step sizes, and its bound."""
    figure = _figure(8, 5)
    axes = figure.add_subplot()
    rows = data["rows"]
    K = [r["K"] for r in rows]
    axes.plot(K, [r["bound"] for r in rows], color=MARK, linewidth=1.8, label="Theorem 1, as printed")
    axes.plot(
        K,
        [r["bound_at_beta"] for r in rows],
        color=MARK,
        linewidth=1.2,
        linestyle=":",
        label="the same with the β_k ≥ λ/10 that is used (see docs/theory.md)",
    )
    axes.plot(K, [r["dense"] for r in rows], color=INK, linewidth=1.5, label="measured, mean of 8 runs (NumPy)")
    own = [r for r in rows if r["federated"] is not None]
    axes.plot(
        [r["K"] for r in own],
        [r["federated"] for r in own],
        "o",
        color=INK,
        markersize=6,
        markerfacecolor="white",
        label="measured, FBO-AggITD on the federation",
    )
    last = rows[-1]
    guide = [last["dense"] * 2 * (k / K[-1]) ** -0.5 for k in K[-4:]]
    axes.plot(K[-4:], guide, color=GREY, linewidth=1, linestyle="--")
    axes.annotate(
        "slope -1/2", (K[-3], guide[1]), xytext=(4, 5), textcoords="offset points", color=GREY, fontsize=9
    )
    axes.set(xscale="log", yscale="log", xlabel="outer iterations K (each K is a run with its own α_k)")
    axes.set_ylabel("1/K Σ ‖∇f(x_k)‖²")
    loose = data["looseness"]
    axes.set_title(
        f"α_k = min(ᾱ_1, ᾱ_2, ᾱ_3, ᾱ/√K) on a quadratic with κ_g = 1.2\n"
        f"The bound is loose: {min(loose):.0f} to {max(loose):.0f} times what is measured. "
        f"Slope of the last four: {data['slope_measured']:.2f}",
        loc="left",
        fontsize=10,
    )
    axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(0.0, 0.44))
    _plain(axes)
    _save(figure, stem)


def draw_orders(data: dict[str, Any], stem: Path) -> None:
    """Draw the constants over κ_g with the fitted exponents beside those that Corollary 1 claims."""
    figure = _figure(12, 4.8)
    panels: list[tuple[str, Sequence[str]]] = [
        ("constants that grow", ("c_3", "β̄", "c_0", "L_f'", "M_f", "L_y")),
        ("largest step sizes", ("ᾱ_1", "ᾱ_3", "ᾱ_2")),
        (
            "bound: coefficients and K for ε = 0.1",
            ("N·K(ε)", "K(ε)", "noise_g·√K", "start·K", "tuned·√K", "estimator·√K"),
        ),
    ]
    colours = [INK, MARK, GREEN, SAND, VIOLET, GREY]
    for axes, (title, symbols) in zip(figure.subplots(1, 3), panels, strict=True):
        for symbol, colour in zip(symbols, colours, strict=False):
            claim = data["claimed"][symbol]
            text = f"{symbol}: {data['fitted'][symbol]:.2f}" + ("" if claim is None else f" (paper {claim})")
            axes.plot(data["kappa"], data["values"][symbol], color=colour, linewidth=1.5, label=text)
        axes.axvspan(1e3, data["kappa"][-1], color="#f3f3f3", zorder=0)
        axes.set(
            xscale="log", yscale="log", xlabel="condition number κ_g", xlim=(data["kappa"][0], data["kappa"][-1])
        )
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="lower left" if "step" in title else "upper left")
        _plain(axes)
    figure.suptitle(
        "Orders in κ_g: fitted exponents (over the shaded part) beside those of Corollary 1; "
        "N = κ_g, λ = 1, ᾱ = κ_g⁻⁴, ρ = 1",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _save(figure, stem)


def draw_lemmas(data: dict[str, Any], stem: Path) -> None:
    """Draw both sides of Lemmas 1, 2 and 3 over the outer iterations of a run."""
    figure = _figure(12, 4.4)
    rows = data["rows"]
    at = [r["k"] for r in rows]
    panels = [
        ("descent", "Lemma 1: objective descent", "$E f(x^+) - E f(x)$"),
        ("warm_start", "Lemma 2: gap at the next warm start", "$E\\|y^+ - y^*(x^+)\\|^2$"),
        ("drift", "Lemma 3: upper client drift", "largest $E\\|x_v^i - x\\|^2$"),
    ]
    for axes, (name, title, label) in zip(figure.subplots(1, 3), panels, strict=True):
        if name != "warm_start":  # Lemma 2 does not contain the bias.
            restated = [r[f"{name}_restated"] for r in rows]
            axes.plot(at, restated, ":", color=MARK, label="right side, $B^I$ bounded by Proposition 1")
        right = "right side" if name == "warm_start" else "right side, $B^I$ measured"
        axes.plot(at, [r[f"{name}_right"] for r in rows], color=MARK, linewidth=1.8, label=right)
        axes.plot(at, [r[f"{name}_left"] for r in rows], color=INK, linewidth=1.5, label="left side, measured")
        axes.set(xlabel="outer iteration k", ylabel=label, xlim=(0, at[-1]))
        if name == "descent":
            axes.axhline(0, color=GREY, linewidth=0.8)
            axes.set_ylim(1.3 * min(r["descent_left"] for r in rows), 1.1 * restated[0])
        else:
            axes.set_yscale("log")
        axes.set_title(title, loc="left", fontsize=10)
        axes.legend(fontsize=8, frameon=False, loc="upper right" if name != "drift" else "center right")
        _plain(axes)
    figure.suptitle(
        f"FBO-AggITD on a noisy quadratic, N = {data['N']}, τ = {data['tau']}, α = {data['alpha']:.3g}, "
        f"β = {data['beta']:.3g}; means over {data['repetitions']:,} repetitions",
        fontsize=10,
        x=0.01,
        ha="left",
    )
    _save(figure, stem)


def _figure(width: float, height: float) -> Figure:
    return canvas.figure(width, height, w_pad=0.1, h_pad=0.08)


def _plain(axes: Axes) -> None:
    axes.grid(color="#eeeeee", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _save(figure: Figure, stem: Path) -> None:
    for kind in ("png", "svg"):
        figure.savefig(stem.with_suffix(f".{kind}"), dpi=130)
