"""The start of every figure. Matplotlib is imported with the first one, because that takes half a second."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def figure(width: float, height: float, w_pad: float | None = None, h_pad: float | None = None) -> Figure:
    """An empty figure, in inches, that fits its axes; `w_pad` and `h_pad` are the space around them."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    return Figure(figsize=(width, height), layout=ConstrainedLayoutEngine(w_pad=w_pad, h_pad=h_pad))


def percent(axis: Any, decimals: int | None = None) -> None:
    """Label an axis of shares in per cent."""
    from matplotlib.ticker import PercentFormatter

    axis.set_major_formatter(PercentFormatter(1.0, decimals=decimals))


def few_ticks() -> Any:
    """At most six ticks at round numbers, which do not touch each other on a narrow figure."""
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(nbins=5)
