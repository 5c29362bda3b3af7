"""Reading specs from TOML files, of the library or of the user, and changing settings on the command line.

Everything is checked before a run makes its folder. An error names the field, its value and a remedy.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..data import GENERATED, DataSettings
from ..errors import SettingsError, one_line, shown
from ..names import PYTHON
from ..problems import Custom
from ..reading import DEPTH, Excessive, Unreadable, parse_toml, read_toml
from ..settings import choose, from_mapping, suggestion, to_mapping
from ._checks import check_parts
from ._spec import CHOSEN, ORDER, SECTIONS, Spec


def load_spec(source: str | Path | None = None, overrides: Mapping[str, Any] | Sequence[str] = ()) -> Spec:
    """Read a spec from a TOML file, or by the name of one that comes with the library (default: the demo).

    `overrides` are {"algorithm.N": 5} or ["algorithm.N=5"], as `--set` takes them.
    """
    raw = _read(source)
    pairs = overrides.items() if isinstance(overrides, Mapping) else map(_parse_override, overrides)
    changes = dict(pairs)
    for key in sorted(changes, key=lambda k: k.removesuffix(".name").count(".")):  # names before their fields
        _override(raw, key, changes[key])
    if changes.get("problem.name") == PYTHON and isinstance(raw.get("data"), dict):  # it was the old problem's
        raw["data"] = {key: value for key, value in raw["data"].items() if f"data.{key}" in changes}
    return parse(raw)


def parse(raw: Mapping[str, Any]) -> Spec:
    """Check parsed TOML and build the spec; an error names the field, its value and a remedy."""
    for key in raw:
        if key not in (*ORDER, "seed"):
            raise SettingsError(f"{one_line(key)} is not a section; {suggestion(key, [*ORDER, 'seed'])}")
    seed = raw.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise SettingsError(f"seed = {shown(seed)} is wrong: use a whole number from 0 to {2**32 - 1}")
    made: dict[str, Any] = {}
    for section in ORDER:
        values = raw.get(section, {})
        if not isinstance(values, Mapping):
            raise SettingsError(f"{section} = {shown(values)} is wrong: it is a section, as in [{section}]")
        if section in CHOSEN:
            made[section] = choose(CHOSEN[section], values, section)
        else:
            made[section] = from_mapping(SECTIONS[section], values, section)
    spec = Spec(**made, seed=seed)
    if spec.problem.makes_data:
        spec = dataclasses.replace(spec, data=dataclasses.replace(spec.data, name=GENERATED))
    if isinstance(spec.problem, Custom):
        _check_unused(spec.data, raw.get("data", {}).get("name", GENERATED))
    if spec.data.name == GENERATED and not spec.problem.makes_data:
        raise SettingsError(
            "data.name = 'generated' is wrong: this problem needs a data set; use mnist, or digits (embedded)"
        )
    spec.data.check()
    parts = spec.federation, spec.attack, spec.privacy, spec.evaluate, spec.stop
    check_parts(spec.algorithm, spec.data.clients, *parts)
    return spec


def _check_unused(data: DataSettings, named: str) -> None:
    """Raise if settings of data are given that a function which makes the clients does not use."""
    given = to_mapping(data, changed=True) | {"name": named}
    for name, value in given.items():
        if name != "clients" and (name, value) != ("name", GENERATED):
            raise SettingsError(
                f"data.{name} = {shown(value)} is not used: problem.function makes its own data; remove it, or "
                "give it to the function, as a key of [problem]"
            )


def _read(source: str | Path | None) -> dict[str, Any]:
    name = "demo" if source is None else str(source)
    packaged = {f.name.removesuffix(".toml"): f for f in (resources.files("fedbilevel") / "specs").iterdir()}
    try:
        return parse_toml(packaged[name].read_bytes()) if name in packaged else read_toml(Path(name))
    except Unreadable as error:
        known = ", ".join(sorted(packaged))
        raise SettingsError(f"spec {name} {error}; give a TOML file, or one of: {known}") from None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key.strip():
        raise SettingsError(f"--set {one_line(text)} is wrong: write key=value, as in --set algorithm.N=5")
    none = value.strip().lower() == "none"
    return key.strip(), None if none else parse_value(value, f"--set {key.strip()}")


def parse_value(text: str, where: str) -> Any:
    """The value that an argument gives: what it means in TOML, or else the text itself, as a bare word."""
    try:
        return parse_toml(f"v = {text}")["v"]
    except Excessive as error:
        raise SettingsError(f"{one_line(where)} is wrong: its value {error}; give another") from None
    except Unreadable:
        return text.strip()


def _override(raw: dict[str, Any], key: str, value: Any) -> None:
    """Set one key, or remove it if the value is None. A new `name` drops the keys that belong to the old one."""
    *path, last = key.split(".")
    if len(path) > DEPTH:
        raise SettingsError(f"{one_line(key)} is not a setting: it is nested too deeply")
    if path and isinstance(value, str) and isinstance(_at(raw, key), dict):  # a bare name for a table
        path, last = [*path, last], "name"
    target = raw
    for depth, part in enumerate(path):
        inner = target.setdefault(part, {})
        if isinstance(inner, str) and depth:  # a bare name of a table
            inner = target[part] = {"name": inner}
        if not isinstance(inner, dict):
            raise SettingsError(f"{key} is not a setting: {part} is not a section")
        target = inner
    if last == "name" and path != ["data"] and target.get("name") != value:
        target.clear()
    if value is None:
        target.pop(last, None)
    else:
        target[last] = value


def _at(raw: dict[str, Any], key: str) -> Any:
    """The value at a key, or None."""
    found: Any = raw
    for part in key.split("."):
        found = found.get(part) if isinstance(found, dict) else None
    return found
