"""Figures of runs, drawn from records only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

INK, FAINT = "#1f4e79", "#c8c8c8"


def draw_curve(history: list[dict[str, Any]], path: Path, title: str) -> None:
    """The course of a run against communication rounds.

    Test accuracy where the problem has one, the norm of the true hypergradient where it is known, else the
    upper loss.
    """
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    rounds = [r["rounds"] for r in history]
    if history[-1].get("test_accuracy") is not None:
        values = [r["test_accuracy"] for r in history]
        reached = next((r for r in history if r["test_accuracy"] >= 0.9), None)
        axes.axhline(0.9, color=FAINT, linewidth=1)
        axes.set(ylabel="test accuracy", ylim=(0, 1))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        if reached is not None:
            axes.plot(reached["rounds"], reached["test_accuracy"], "o", color="#b5482a", zorder=3)
            axes.annotate(
                f"90 % after {reached['rounds']} rounds",
                (reached["rounds"], reached["test_accuracy"]),
                xytext=(12, -26),
                textcoords="offset points",
                color="#b5482a",
            )
    elif "hypergradient_norm" in history[-1]:
        values = [r["hypergradient_norm"] for r in history]
        axes.set(ylabel="norm of the true hypergradient", yscale="log")
    else:
        values = [r["upper_loss"] for r in history]
        axes.set(ylabel="upper loss")
    axes.plot(rounds, values, color=INK, linewidth=1.3)
    axes.set(xlabel="communication rounds", title=title)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
