"""The picture of a diagnosis: the curvature, the bias of the series, and the estimate beside the hypergradient."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..report import INK, MARK
from ..report.canvas import figure

if TYPE_CHECKING:
    from ._diagnose import Diagnosis

FAINT = "#9a9a9a"


def draw_diagnosis(found: Diagnosis, path: Path) -> None:
    """Draw three panels side by side."""
    canvas = figure(12.5, 4.0, w_pad=0.12, h_pad=0.08)
    left, middle, right = canvas.subplots(1, 3)
    _curvature(left, found)
    _series(middle, found)
    _estimate(right, found)
    for axes in (left, middle, right):
        axes.spines[["top", "right"]].set_visible(False)
    canvas.savefig(path, dpi=130)


def _curvature(axes: Any, found: Diagnosis) -> None:
    """The Ritz values with the share of ∇_y f that belongs to each, and the inverse of the product's step."""
    values, weights = np.asarray(found.spectrum.values), np.asarray(found.spectrum.weights)
    shown = values > 0
    axes.vlines(values[shown], 0, weights[shown], color=INK, linewidth=1.2)
    axes.plot(values[shown], weights[shown], "o", color=INK, markersize=4)
    for value, name in ((found.spectrum.mu, "mu"), (found.spectrum.L_g, "L_g")):
        if value > 0:
            axes.axvline(value, color=FAINT, linewidth=0.8, linestyle=":")
            axes.annotate(name, (value, 1), xycoords=("data", "axes fraction"), ha="center", va="bottom")
    if found.lam is not None:
        axes.axvline(1 / found.lam, color=MARK, linewidth=1, label=f"1 over the step, {1 / found.lam:.3g}")
        axes.legend(frameon=False, fontsize=8)
    axes.set(xscale="log", xlabel="curvature of the mean lower loss (Ritz values)", ylabel="share of ∇_y f")
    axes.set_ylim(bottom=0)
    axes.set_title("Curvature", loc="left", fontsize=11, pad=16)


def _series(axes: Any, found: Diagnosis) -> None:
    """The bias of p against the number of terms, for the present step and for 1/L_g."""
    spectrum = found.spectrum
    best = 1 / max(spectrum.safe_L, 1e-30)
    most = max(2 * (found.terms or 1), 40)
    terms = np.unique(np.geomspace(1, most, 60).astype(int))
    lines = [(best, INK, "1/L_g")]
    if found.lam is not None and abs(found.lam / best - 1) > 0.05:
        lines.append((found.lam, MARK, f"present step {found.lam:g}"))
    for lam, colour, name in lines:
        axes.plot(terms, [spectrum.bias(lam, int(n)) for n in terms], color=colour, label=f"{name}, for ∇_y f")
    axes.plot(
        terms,
        [spectrum.tail(best, int(n)) for n in terms],
        color=FAINT,
        linestyle="--",
        label="1/L_g, worst vector",
    )
    if found.lam is not None and found.terms is not None:
        axes.plot(found.terms, spectrum.bias(found.lam, found.terms), "o", color=MARK, label="the method as it is")
    axes.set(xscale="log", yscale="log", xlabel="terms of the Neumann series", ylabel="relative bias of p")
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, 1e-6), min(max(high, 1.2), 1e3))
    axes.legend(frameon=False, fontsize=8, loc="lower left")
    axes.set_title("Bias of the series", loc="left", fontsize=11, pad=16)


def _estimate(axes: Any, found: Diagnosis) -> None:
    """The components of the method's estimate against those of the hypergradient."""
    truth, mean = found.hypergradient, found.estimate
    spread = found.estimates.std(0)
    chosen = np.argsort(-np.abs(truth))[:400]  # of a large x, the components that matter most
    reach = float(np.abs(np.concatenate([truth[chosen], mean[chosen]])).max(initial=1e-12)) * 1.1
    axes.plot([-reach, reach], [-reach, reach], color=FAINT, linewidth=0.8)
    direct = truth - found.implicit
    axes.plot(truth[chosen], direct[chosen], "x", color=FAINT, markersize=4, label="∇_x f alone")
    axes.errorbar(
        truth[chosen],
        mean[chosen],
        spread[chosen],
        fmt="o",
        color=INK,
        markersize=3,
        linewidth=0.8,
        label="estimate",
    )
    axes.set(xlabel="component of the true hypergradient", ylabel="component of the estimate")
    axes.legend(frameon=False, fontsize=8)
    share = f"bias {found.bias:.0%}, implicit share {found.implicit_share:.0%}"
    axes.set_title(f"Estimate: {share}", loc="left", fontsize=11, pad=16)
