"""The summary of a run: what it cost to reach each accuracy, and what it ended with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from ._metrics import direction, metric_names

LEVELS = ("0.80", "0.85", "0.90", "0.95")
SILENT = 3  # A client is left out if this many of its replies, up to the last, were not used.


WINDOW = 500  # the default of `evaluate.window`


def summarise(
    history: list[dict[str, Any]],
    ledger: Mapping[str, Any],
    *,
    window: int = WINDOW,
    metric: str = "test_accuracy",
    **more: Any,
) -> dict[str, Any]:
    """The summary of a run from its history and its ledger; `more` is added as it is.

    `metric` is the accuracy that it is about. All other metrics of the history are under `metrics`; the training
    accuracy, if it was measured, has the same figures as the accuracy.
    """
    last = history[-1]
    reached = {level: _first_at(history, metric, float(level)) for level in LEVELS}
    trained = any(r.get("train_accuracy") is not None for r in history)
    others = [name for name in metric_names(history) if name not in (metric, "train_accuracy")]
    return {
        "rounds": last["rounds"],
        "iterations": last["iteration"],
        "rounds_to": {level: r and r["rounds"] for level, r in reached.items()},
        "bytes_to": {level: r and r["bytes_up"] + r["bytes_down"] for level, r in reached.items()},
        "seconds_to": {level: r and r["seconds"] for level, r in reached.items()},
        "accuracy": in_window(history, metric, window),
        **({"train_accuracy": in_window(history, "train_accuracy", window)} if trained else {}),
        "metrics": {name: in_window(history, name, window) for name in others},
        "ledger": ledger["steps"],
        "probes": ledger["probes"],
        "rejected": ledger["rejected"],
        **{key: ledger[key] for key in ("said", "injected", "exclusions", "forgotten") if ledger.get(key)},
        **({"left_out": left} if (left := left_out(ledger)) else {}),
        **more,
    }


def in_window(history: list[dict[str, Any]], metric: str, window: int) -> dict[str, float | None]:
    """The last and the best value of a metric, and its mean and standard deviation over the last rounds.

    The mean and the deviation are over the evaluations of the last `window` rounds, so that methods whose
    iterations take different numbers of rounds are averaged over the same span. Evaluations that lack the metric
    are left out; if all of the window do, the last one that has it is taken.
    """
    measured = [(r["rounds"], r[metric]) for r in history if r.get(metric) is not None]
    values = np.asarray([value for _, value in measured])
    tail = np.asarray([value for rounds, value in measured if rounds > history[-1]["rounds"] - window])
    tail = tail if len(tail) else values[-1:]
    return {
        "last": number(values[-1]) if len(values) else None,
        "best": number(values.max() if direction(metric) == "max" else values.min()) if len(values) else None,
        "mean": number(tail.mean()) if len(values) else None,
        "std": number(tail.std()) if len(values) else None,
        "window": window,
    }


def left_out(ledger: Mapping[str, Any]) -> dict[str, str]:
    """The clients that the result owes little or nothing to, each with the reason in one line."""
    found: dict[str, str] = {}
    for each in ledger.get("exclusions", ()):
        found[str(each["client"])] = f"excluded from round {each['round']} to {each['until']}"
    for client, (since, replies, reason) in ledger.get("silent", {}).items():
        if client in found or replies >= SILENT:
            before = f"{found[client]}; " if client in found else ""
            found[client] = f"{before}no valid reply since round {since} ({replies} not used; the last: {reason})"
    return found


def number(value: Any) -> float | None:
    """A float rounded to six digits, the precision of a float32; None if it is not finite.

    JSON cannot express a number that is not finite.
    """
    return float(f"{float(value):.6g}") if math.isfinite(float(value)) else None


def _first_at(history: Iterable[dict[str, Any]], metric: str, accuracy: float) -> dict[str, Any] | None:
    """The first evaluation that reached this accuracy."""
    return next((r for r in history if (r.get(metric) or 0.0) >= accuracy), None)
