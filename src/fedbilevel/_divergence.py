"""Detection of divergence, the setting that is to blame, and a value to try instead.

In a run that diverges all vectors grow, whichever step size is too large, because each is computed from the
others. So the blame does not go by the first vector that overflows. The curvature L of the lower loss is measured
at the last good state instead: a lower step size beyond 2/L, or a step of the Hessian product beyond 1/L, cannot
work. If there is none, the upper step size is to blame, unless x has not moved since the good state.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from . import rng
from ._probes import curvature
from .errors import Diverged, SettingsError, TooFewReplies
from .federation import Federation
from .steps import Samples
from .stepsizes import Limited, Moves, StepSize, step_sizes, value_of

EXPLODED = 1e6  # A run has diverged if a loss exceeds this multiple of max(|its first value|, 1).
POWER_ITERATIONS = 20
NEAR = 0.5  # A step size at this share of its limit is suspected if its own vector overflows.
# The losses are measured after all vectors have moved, so they count only if the curvature is not known.
LOSSES = {"lower_loss": Moves.LOWER, "lower": Moves.LOWER, "upper_loss": Moves.UPPER, "upper": Moves.UPPER}
A = TypeVar("A")


class Restart(NamedTuple):
    """One return of a run to its last good state, with another value of a setting."""

    iteration: int
    setting: str
    before: float
    after: float
    rounds_lost: int
    reason: str


def check_losses(record: Mapping[str, Any], first: Mapping[str, Any]) -> None:
    """Raise `Diverged` if a loss is not finite, or has exploded since the first evaluation."""
    for loss in ("upper_loss", "lower_loss"):
        value, start = record[loss], first[loss]
        if start is None:  # not measured, as in a private run
            continue
        if value is None or value > EXPLODED * max(1.0, abs(start)):
            seen = "is not finite" if value is None else f"exploded from {start:.3g} to {value:.3g}"
            raise Diverged(f"{loss} {seen}, after round {record['rounds']}", [loss])


class Suspect(NamedTuple):
    """The setting that is to blame: its value, a value to try, and what is wrong with it."""

    setting: str
    value: float
    suggested: float
    why: str


def largest_curvature(fed: Federation, state: Any, clients: Sequence[int], seed: int) -> float | None:
    """The largest norm of ∇²_y g_i among these clients at a state; None if it cannot be measured.

    It is measured client by client, because a single client with local steps that diverge spoils the mean of all.
    A private federation has no measurements.
    """
    v = rng.generator(seed, "curvature").normal(size=state.y.size).astype("float32")
    u, found = Samples("lower", None, POWER_ITERATIONS), list[float]()
    for client in clients:
        try:
            found.append(float(fed.probe(curvature, clients=(client,), x=state.x, y=state.y, v=v, u=u).L))
        except (TooFewReplies, SettingsError):
            continue
    return max(found, default=None)


def suspect(algorithm: Any, error: Diverged, L: float | None, x_moved: bool, clients: int) -> Suspect | None:
    """The setting that is to blame, given the curvature L at the last good state, if it is known.

    x_moved   whether x has changed since the good state, so that the upper step size may be to blame
    """
    sizes = step_sizes(algorithm)
    if L is not None:
        limits = {each: _limit(algorithm, each.moves, clients) for each in sizes}
        shares = {
            each: (1 / value if each.inverse else value) * L / limit
            for each, limit in limits.items()
            if limit is not None and (value := value_of(algorithm, each.setting)) > 0
        }
        worst = max(shares, key=lambda each: shares[each], default=None)
        if worst is not None and shares[worst] > 1:
            return _beyond(algorithm, worst, L, limits[worst] or 1.0)
        own = next((each for each in shares if each.moves is error.moved), None)
        if own is not None and (shares[own] > NEAR or not x_moved):
            return _likely(algorithm, own)
        blamed = error.moved if not x_moved else Moves.UPPER
    else:
        blamed = error.moved or next((LOSSES[name] for name in error.fields if name in LOSSES), Moves.UPPER)
    found = next((each for each in sizes if each.moves is blamed), None)
    found = found or next((each for each in sizes if each.moves is Moves.UPPER), None)
    if not sizes:  # a method that declares nothing: a number that it sent and that is among its settings
        named = (name for name in error.numbers if isinstance(getattr(algorithm, name, None), float))
        found = next((StepSize(name, Moves.UPPER) for name in named), None)
    return None if found is None else _likely(algorithm, found)


def _limit(algorithm: Any, moves: Moves, clients: int) -> float | None:
    return algorithm.limit(moves, clients) if isinstance(algorithm, Limited) else moves.value


def _beyond(algorithm: Any, each: StepSize, L: float, limit: float) -> Suspect:
    """A step size that cannot work, whatever the others are. At half of its limit, a lower step is fastest."""
    value, of = value_of(algorithm, each.setting), f"for a lower loss of curvature {L:.3g}"
    good = limit / L / (2 if each.moves is Moves.LOWER else 1)
    if each.inverse:
        return Suspect(each.setting, value, _rounded(max(2 * value, 1 / good), math.ceil), f"is too small {of}")
    why = f"is too large {of}, where it must stay below {limit / L:.3g}"
    return Suspect(each.setting, value, _rounded(min(value / 2, good), math.floor), why)


def _likely(algorithm: Any, each: StepSize) -> Suspect:
    value = value_of(algorithm, each.setting)
    if each.inverse:
        return Suspect(each.setting, value, 2 * value, "is likely too small")
    return Suspect(each.setting, value, value / 2, "is likely too large")


def _rounded(value: float, direction: Callable[[float], int]) -> float:
    """Two digits of a positive number, rounded in a direction."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{direction(round(value / unit, 6)) * unit:.2g}")


def advice(found: Suspect | None, restarted: int | None) -> str:
    """What is wrong and what to try. `restarted` counts the restarts; None if the run was not told to restart."""
    if found is None:
        return "; a step size of the method is likely too large"
    told = f"; algorithm.{found.setting} = {found.value:g} {found.why}: try {found.suggested:g}"
    if restarted is None:
        return f"{told}, or --on-divergence restart"
    return f"{told}; the run has restarted {restarted} times" if restarted else told


def smaller(algorithm: A, setting: str, value: Any) -> A:
    """The algorithm with another value of a setting, which may be within another one."""
    outer, _, inner = setting.rpartition(".")
    if outer:
        return smaller(algorithm, outer, getattr(algorithm, outer).having(inner, value))
    made: A = dataclasses.replace(algorithm, **{setting: value})  # type: ignore[type-var]
    return made
