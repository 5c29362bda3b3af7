"""The summary of a run: what it cost to reach each accuracy, and what it ended with."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

LEVELS = ("0.80", "0.85", "0.90", "0.95")
SILENT = 3  # A client is left out if this many of its replies, up to the last, were not used.


def summarise(history: list[dict[str, Any]], ledger: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """The summary of a run from its history and its ledger; `more` is added as it is."""
    last = history[-1]
    reached = {level: _first_at(history, float(level)) for level in LEVELS}
    accuracies = np.asarray([r["test_accuracy"] for r in history if r["test_accuracy"] is not None])
    tail = accuracies[-100:]
    return {
        "rounds": last["rounds"],
        "iterations": last["iteration"],
        "rounds_to": {level: r and r["rounds"] for level, r in reached.items()},
        "bytes_to": {level: r and r["bytes_up"] + r["bytes_down"] for level, r in reached.items()},
        "seconds_to": {level: r and r["seconds"] for level, r in reached.items()},
        "accuracy": {
            "last": number(tail[-1:].mean()) if len(tail) else None,
            "best": number(accuracies.max()) if len(tail) else None,
            "mean_last_100": number(tail.mean()) if len(tail) else None,
            "std_last_100": number(tail.std()) if len(tail) else None,
        },
        "ledger": ledger["steps"],
        "probes": ledger["probes"],
        "rejected": ledger["rejected"],
        **{key: ledger[key] for key in ("said", "injected", "exclusions", "forgotten") if ledger.get(key)},
        **({"left_out": left} if (left := left_out(ledger)) else {}),
        **more,
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


def _first_at(history: Iterable[dict[str, Any]], accuracy: float) -> dict[str, Any] | None:
    """The first evaluation that reached this accuracy."""
    return next((r for r in history if (r["test_accuracy"] or 0.0) >= accuracy), None)
