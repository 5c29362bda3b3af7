"""Fitting the exponent of a power law."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Fit the exponent of a power law: the slope of log value over log argument by least squares."""
    return float(np.polyfit(np.log(at), np.log(values), 1)[0])
