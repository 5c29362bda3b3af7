"""The methods of the leaderboard, and the points that are tried of each: as many for one method as for any other.

The step sizes are those that a method declares with `Moves`: all upper ones move together, and so do all lower
ones and those of Hessian products, as multiples of 1/L_g. Its own knobs have the mark `Tried`. The points
are the product of both, with as many values of the step sizes as fit.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from ..algorithms import ALGORITHMS
from ..errors import UnknownName
from ..settings import from_mapping, is_settings
from ..stepsizes import Moves, StepSize, step_sizes
from ..trials import trials_of
from ._problems import BoardProblem

Point = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A method of the leaderboard.

    name      its name in a spec
    fixed     the settings that make it a method of its own, such as the control of FedAvg
    control   whether it solves another problem, to compare with
    """

    name: str
    fixed: tuple[tuple[str, Any], ...] = ()

    @property
    def label(self) -> str:
        return " ".join([self.name, *(str(value) for _, value in self.fixed)])

    @property
    def kind(self) -> type[Any]:
        return ALGORITHMS[self.name]

    @property
    def control(self) -> bool:
        return bool(getattr(self.kind, "is_control", False))

    @property
    def samples(self) -> bool:
        """Whether it draws cohorts."""
        return any(each.name == "participation" for each in fields(self.kind))


def entries(names: Sequence[str] = ()) -> list[Entry]:
    """All registered methods, or those of these names; one whose setting is `apart` is several."""
    made: list[Entry] = []
    for name in ALGORITHMS:
        kind = ALGORITHMS[name]
        if not is_settings(kind):  # a spec cannot set it
            continue
        own = trials_of(kind).apart
        made += [Entry(name, tuple(zip(own, values, strict=True))) for values in itertools.product(*own.values())]
    if not names:
        return made
    chosen: list[Entry] = []
    for name in names:
        found = [each for each in made if name in (each.name, each.label)]
        if not found:
            raise UnknownName("--methods", name, [each.label for each in made])
        chosen += found
    return list(dict.fromkeys(chosen))


def grid(entry: Entry, problem: BoardProblem, L: float, points: int) -> list[Point]:
    """The settings of each point that is tried: at most `points`, and as many if the knobs divide that number."""
    own = trials_of(entry.kind).tried
    knobs = [dict(zip(own, values, strict=True)) for values in itertools.product(*own.values())][:points]
    common: Point = dict(entry.fixed)
    sizes = step_sizes(from_mapping(entry.kind, common, "algorithm"))
    upper = [each for each in sizes if each.moves is Moves.UPPER]
    lower = [each for each in sizes if each.moves is not Moves.UPPER]
    alphas, betas = _counts(max(1, points // len(knobs)), bool(upper), bool(lower))
    steps = [
        {**_all(upper, alpha), **_all(lower, beta)}
        for alpha in _spaced(problem.alpha, alphas)
        for beta in _spaced((problem.beta[0] / L, problem.beta[1] / L), betas)
    ]
    return [{**common, **knob, **step} for knob in knobs for step in steps]


def at_edge(entry: Entry, chosen: Point, tried: Sequence[Point]) -> list[str]:
    """The step sizes of a chosen point that are at the end of the range that was searched."""
    sizes = step_sizes(from_mapping(entry.kind, dict(entry.fixed), "algorithm"))
    found = []
    for each in sizes:
        values = [point[each.setting] for point in tried]
        if min(values) < max(values) and chosen[each.setting] in (min(values), max(values)):
            found.append(each.setting)
    return found


def _counts(points: int, upper: bool, lower: bool) -> tuple[int, int]:
    """How many values of the upper and of the lower step sizes make so many points; the upper ones have more."""
    if not (upper and lower):
        return (points if upper else 1), (points if lower else 1)
    betas = max(each for each in range(1, math.isqrt(points) + 1) if points % each == 0)
    return points // betas, betas


def _spaced(ends: tuple[float, float], count: int) -> list[float]:
    """Values from one end of a range to the other in equal ratios; one value is the middle."""
    values = np.geomspace(*ends, count) if count > 1 else [math.sqrt(ends[0] * ends[1])]
    return [float(f"{value:.3g}") for value in values]


def _all(sizes: Sequence[StepSize], value: float) -> Mapping[str, float]:
    return {each.setting: 1 / value if each.inverse else value for each in sizes}
