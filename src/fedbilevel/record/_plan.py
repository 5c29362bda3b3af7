"""The facts about a run that its folder needs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import tomli_w

# Settings that decide when a run ends and how it is shown. They may change when a run is resumed.
APART = ("stop", "evaluate.window", "evaluate.metric")


def digest_of(values: Mapping[str, Any]) -> str:
    """The digest of the settings that decide a trajectory, so that a run can go on with a larger budget."""
    decisive: dict[str, Any] = {}
    for name, section in values.items():
        if name in APART:
            continue
        if isinstance(section, Mapping):
            section = {key: value for key, value in section.items() if f"{name}.{key}" not in APART}
        if section != {}:
            decisive[name] = section
    return hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Plan:
    """The settings of a run, as its folder sees them.

    values   the settings as nested TOML values; this is what spec.toml says
    digest   names the trajectory: two plans with the same digest differ at most in `APART`
    every    the number of outer iterations between two evaluations
    changed  the settings that differ from their defaults (default: all of them)
    sources  the SHA-256 of the source of each module that the settings name by its address, by setting
    """

    values: Mapping[str, Any]
    digest: str
    every: int = 1
    changed: Mapping[str, Any] | None = None
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        """The digest of the settings and of the sources."""
        if not self.sources:
            return self.digest
        told = json.dumps([self.digest, dict(self.sources)], sort_keys=True)
        return hashlib.sha256(told.encode()).hexdigest()[:16]

    def to_toml(self) -> str:
        """The text of spec.toml."""
        return tomli_w.dumps(self.values)

    def change_since(self, written: Mapping[str, Any]) -> str | None:
        """The first setting outside of `APART` that differs from the settings written before, or None.

        The text reads "algorithm.N was 1 and is 2". A setting that was not written, because an older version did
        not have it, and that has its default now is no change.
        """
        before, now = flat_settings(written), flat_settings(self.values)
        changed = now if self.changed is None else flat_settings(self.changed)
        apart = tuple(f"{each}." for each in APART)
        for name in sorted(before.keys() | (now.keys() & changed.keys())):
            if not f"{name}.".startswith(apart) and before.get(name) != now.get(name):
                return f"{name} was {before.get(name)} and is {now.get(name)}"
        return None


def flat_settings(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings under their full names, as in "algorithm.N"."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flat_settings(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
