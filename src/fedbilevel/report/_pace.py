"""How far a run is, and how long it will take.

A history has the seconds of training, and not the time of day. So the time that is left is what training will take
at the speed of the second half of the evaluations, times the ratio of the time that has passed to the seconds of
training so far. The first half is left out because programs are compiled in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from ..record import Glance

LATE = 10  # a run is quiet if it takes this many times as long to its next evaluation as usual
QUIET = 60.0  # seconds that an evaluation may take in any case


@dataclass(frozen=True)
class Pace:
    """How far a run is.

    share    the share of its budget that is used, if it has a limit on rounds, iterations or seconds
    told     the same in words
    passed   seconds since the process of the run was started, up to the last evaluation
    left     seconds until the budget is spent, if the run is under way
    at_most  whether the run may end before, because a goal is reached or nothing gets better
    quiet    seconds since the last evaluation, if that is much longer than usual
    ago      seconds since the last evaluation
    """

    share: float | None = None
    told: str = ""
    passed: float | None = None
    left: float | None = None
    at_most: bool = False
    quiet: float | None = None
    ago: float | None = None


def pace_of(look: Glance, now: float) -> Pace:
    """How far a run is at this time of day, in seconds since 1970."""
    stop = look.settings.get("stop")
    limits = stop if isinstance(stop, Mapping) else {}
    if not look.history:
        return Pace()
    share, told = _used(look.history[-1], limits)
    started, written = _started(look.environment), look.written
    passed = None if started is None or written is None else max(written - started, 0.0)
    at_most = any(limits.get(name) is not None for name in ("accuracy", "at", "patience"))
    if look.status != "under way" or written is None:
        return Pace(share, told, passed)
    ago = max(now - written, 0.0)
    here = _of_this_process(look)
    usual = None if passed is None else passed / max(len(here) - 1, 1)
    quiet = ago if usual is not None and ago > max(LATE * usual, QUIET) else None
    left = _left(here, limits, passed)
    return Pace(share, told, passed, None if left is None else max(left - ago, 0.0), at_most, quiet, ago)


def _used(record: Mapping[str, Any], limits: Mapping[str, Any]) -> tuple[float | None, str]:
    """The share of the budget that is used, and the limit that decides it, in words."""
    used = (("rounds", "rounds"), ("iteration", "iterations"), ("seconds", "seconds"))
    parts = [
        (record[field] / limits[name], f"{record[field]:,.0f} of {limits[name]:,.0f} {name}")
        for field, name in used
        if _is_amount(limits.get(name)) and math.isfinite(record[field])
    ]
    if not parts:
        return None, ""
    share, told = max(parts)
    return min(max(share, 0.0), 1.0), told


def _left(records: Sequence[Mapping[str, Any]], limits: Mapping[str, Any], passed: float | None) -> float | None:
    """Seconds until the budget is spent, from the evaluations of this process."""
    if len(records) < 2 or passed is None:
        return None
    first, middle, last = records[0], records[(len(records) - 1) // 2], records[-1]
    done, before = _used(last, limits)[0], _used(middle, limits)[0]
    trained, lately = last["seconds"] - first["seconds"], last["seconds"] - middle["seconds"]
    if done is None or before is None or done <= before or not (trained > 0 and lately > 0):
        return None
    left = (1 - done) * lately / (done - before) * max(passed / trained, 1.0)
    return left if math.isfinite(left) else None


def _of_this_process(look: Glance) -> list[Mapping[str, Any]]:
    """The evaluations since the run was started, or was resumed."""
    start = look.environment.get("iteration")
    first = start if type(start) is int else 0
    return [record for record in look.history if record["iteration"] >= first]


def _started(environment: Mapping[str, Any]) -> float | None:
    try:
        return datetime.fromisoformat(environment["started"]).timestamp()
    except (KeyError, TypeError, ValueError, OverflowError):
        return None


def _is_amount(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def in_words(seconds: float) -> str:
    """A duration as a person says it."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min" + (f" {whole % 60} s" if whole < 600 else "")
    if whole < 48 * 3600:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86400:,} days"
