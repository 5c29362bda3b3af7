"""Figures of runs, drawn from records only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from . import canvas

LABELS = {"hypergradient_norm": "norm of the true hypergradient"}
LOGARITHMIC = ("hypergradient_norm", "hypergradient_estimate", "lower_residual", "update_x", "update_y")
INK, FAINT, MARK = "#1f4e79", "#c8c8c8", "#b5482a"


def draw_curve(history: list[dict[str, Any]], path: Path, title: str, metric: str | None = None) -> None:
    """Draw a metric of a run against communication rounds.

    By default it is the test accuracy if the problem measures it, else the norm of the true hypergradient if it is
    known, else the upper loss. Evaluations that lack the metric, or have no finite value of it, are gaps.
    """
    metric = metric or _main_metric(history)
    figure = canvas.figure(7, 4.2, w_pad=0.12, h_pad=0.08)
    axes = figure.add_subplot()
    rounds = [r["rounds"] for r in history]
    values = np.asarray([r.get(metric) for r in history], float)  # None becomes NaN
    if metric == "test_accuracy":
        reached = next((r for r in history if (r.get(metric) or 0.0) >= 0.9), None)
        axes.axhline(0.9, color=FAINT, linewidth=1)
        axes.set(ylabel="test accuracy", ylim=(0, 1))
        canvas.percent(axes.yaxis)
        if reached is not None:
            at, late = reached["rounds"], reached["rounds"] > rounds[-1] / 2
            axes.vlines(at, 0, reached["test_accuracy"], color=MARK, linewidth=0.8, linestyle=":")
            axes.plot(at, reached["test_accuracy"], "o", color=MARK, zorder=3)
            axes.annotate(  # at the foot of the line, on its wider side, where the curve never is
                f"90 % after {at:,} rounds",
                (at, 0.04),
                xytext=(-6 if late else 6, 0),
                textcoords="offset points",
                ha="right" if late else "left",
                color=MARK,
            )
    else:
        axes.set(ylabel=LABELS.get(metric, metric.replace("_", " ")))
        if metric in LOGARITHMIC and np.any(values > 0):
            axes.set(yscale="log")
    axes.plot(rounds, values, color=INK, linewidth=1.3, marker="o" if len(values) == 1 else None)
    axes.set(xlabel="communication rounds", xlim=(0, max(rounds[-1], 1)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _main_metric(history: list[dict[str, Any]]) -> str:
    """The metric that says most about a run."""
    for metric in ("test_accuracy", "hypergradient_norm"):
        if any(r.get(metric) is not None for r in history):
            return metric
    return "upper_loss"
