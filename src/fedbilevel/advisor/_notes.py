"""What a run is told about its Hessian products while it goes on, at no cost in communication.

A method shows the first and the last vector of its series (`Federation.show_series`). Their lengths tell how much
one product takes away: for z^n = (I - λH)^n r that is a = (||z^n|| / ||r||)^(1/n), and for the sum
s^n = Σ_{k≤n} (I - λH)^k r it is the a with  Σ_{k≤n} a^k = ||s^n|| / ||r||. A series of m terms then has about
1 - a^m of the implicit part of the hypergradient. This is a rough figure, of the direction r only and of y on its
way, but it tells two per cent from eighty; `fedbilevel diagnose` measures the share.

If a product turns the vector round or makes it longer, λ L_g is above one.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..federation import Series
from ..stepsizes import Moves, Terms, marks_of
from ._values import chosen_settings, setting_that

MISSING = 0.5  # Below this share of the implicit part, most of it is missing.


def implicit_share(series: Series, terms: int) -> float | None:
    """About how much of the implicit part a series of so many terms has; None if the vectors do not tell."""
    first, last = (float(np.linalg.norm(np.asarray(v, np.float64))) for v in (series.first, series.last))
    if series.products < 1 or not (first > 0 and np.isfinite(last)):
        return None
    ratio = last / first
    if not series.summed:
        return 1 - min(ratio, 1.0) ** (terms / series.products)
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**k for k in range(series.products + 1)) < ratio else (low, middle)
    return 1 - low**terms


def is_too_long(series: Series) -> bool:
    """Whether the step of the product is beyond 1/L_g: a product turns the vector round, or makes it longer."""
    if series.summed or series.products < 1:
        return False
    first, last = (np.asarray(v, np.float64) for v in (series.first, series.last))
    turned = series.products == 1 and float(first @ last) < 0
    return turned or float(np.linalg.norm(last)) > 1.01 * float(np.linalg.norm(first))


def notes_on(algorithm: Any, series: Series) -> dict[str, str]:
    """What there is to say about the Hessian products of the last iteration, by a name for each kind."""
    step, length = setting_that(algorithm, Moves.PRODUCT), _length_of(algorithm)
    if step is None or length is None:
        return {}
    lam, (name, more) = getattr(algorithm, step), length
    if is_too_long(series):
        why = "is above 1/L_g by now, so the series of Hessian products need not converge"
        return {"long": f"algorithm.{step} = {lam:g} {why}; make it smaller, or 'auto'"}
    count = getattr(algorithm, name)
    share = implicit_share(series, count + more)
    if share is None or share >= MISSING:
        return {}
    what = f"algorithm.{step} = {lam:g} and {name} = {count} give about {share:.0%} of the implicit part of the"
    return {"missing": f"{what} hypergradient; fedbilevel diagnose measures it and recommends values"}


def _length_of(algorithm: Any) -> tuple[str, int] | None:
    """The setting that is the length of the series, and how many terms more than that there are."""
    for name in chosen_settings(algorithm):
        for mark in marks_of(algorithm, name):
            if isinstance(mark, Terms):
                return name, mark.more
    return None
