"""Figures of runs, drawn from records only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from . import canvas

INK, FAINT, MARK = "#1f4e79", "#c8c8c8", "#b5482a"


def draw_curve(history: list[dict[str, Any]], path: Path, title: str) -> None:
    """Draw the course of a run against communication rounds.

    The curve shows the test accuracy if the problem measures it, else the norm of the true hypergradient if it is
    known, else the upper loss.
    """
    figure = canvas.figure(7, 4.2, w_pad=0.12, h_pad=0.08)
    axes = figure.add_subplot()
    rounds = [r["rounds"] for r in history]
    if history[-1].get("test_accuracy") is not None:
        values = [r["test_accuracy"] for r in history]
        reached = next((r for r in history if r["test_accuracy"] >= 0.9), None)
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
    elif "hypergradient_norm" in history[-1]:
        values = [r["hypergradient_norm"] for r in history]
        axes.set(ylabel="norm of the true hypergradient", yscale="log")
    else:
        values = [r["upper_loss"] for r in history]
        axes.set(ylabel="upper loss")
    axes.plot(rounds, values, color=INK, linewidth=1.3, marker="o" if len(values) == 1 else None)
    axes.set(xlabel="communication rounds", xlim=(0, max(rounds[-1], 1)))
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.set_title(title, loc="left", fontsize=11)
    axes.grid(axis="y", color="#eeeeee")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
