"""The facts about a run that its folder needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import tomli_w


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of settings. It leaves out `stop`, so that a run can go on with a larger budget."""
    decisive = {name: section for name, section in values.items() if name != "stop"}
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The settings of a run, as its folder sees them.

    values  the settings as nested TOML values; this is what spec.toml says
    digest  names the trajectory: two plans with the same digest differ at most in when they stop
    every   the number of outer iterations between two evaluations
    """

    values: Mapping[str, Any]
    digest: str
    every: int = 1

    def to_toml(self) -> str:
        """The text of spec.toml."""
        return tomli_w.dumps(self.values)

    def change_since(self, written: Mapping[str, Any]) -> str | None:
        """The first setting outside of `stop` that differs from the settings written before, or None.

        The text reads "algorithm.N was 1 and is 2".
        """
        before, now = flat_settings(written), flat_settings(self.values)
        for name in sorted(before.keys() | now.keys()):
            if not name.startswith("stop.") and before.get(name) != now.get(name):
                return f"{name} was {before.get(name)} and is {now.get(name)}"
        return None


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under their full names, as in "algorithm.N"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
