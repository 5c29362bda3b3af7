"""The reference of all settings, read from the code: one page for each section of a spec."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import tomli_w

from fedbilevel.names import Names
from fedbilevel.settings import meanings, to_mapping
from fedbilevel.spec._spec import CHOSEN, ORDER, SECTIONS

TITLES = {
    "problem": "Problems",
    "data": "Data",
    "algorithm": "Methods",
    "federation": "Federation, engines and aggregators",
    "attack": "Attacks",
    "privacy": "Privacy",
    "evaluate": "Evaluation",
    "stop": "The end of a run",
}


def pages() -> Iterator[tuple[str, str]]:
    """The address and the text of the page of each section."""
    for section in ORDER:
        yield f"reference/settings-{section}.md", "\n".join(_page(section)) + "\n"


def _page(section: str) -> Iterator[str]:
    yield f"# {TITLES[section]}: the section `[{section}]`"
    yield ""
    yield "This page is made from the code. `fedbilevel run SPEC --print-spec` prints it for one spec, as a TOML."
    if section in CHOSEN:
        yield f"`{section}.name` chooses one of these; `python` and `{section}.class` choose a class of your own."
        yield from _choices(section, CHOSEN[section], "##")
        return
    cls = SECTIONS[section]
    yield from _settings(section, cls)
    for field, table in _inner(cls).items():
        yield from ("", f"## `{section}.{field}`", "", f"`{section}.{field}.name` chooses one of the following.")
        yield from _choices(f"{section}.{field}", table, "###")


def _choices(where: str, table: Names[type[Any]], level: str) -> Iterator[str]:
    for name in table:
        cls = table[name]
        if not cls.__module__.startswith("fedbilevel."):
            continue  # a package that happens to be installed where the site is built
        yield from ("", f"{level} `{name}`")
        yield from _settings(where, cls)


def _settings(where: str, cls: type[Any]) -> Iterator[str]:
    yield from ("", inspect.cleandoc(cls.__doc__ or ""), "")
    meaning, inner = meanings(cls), _inner(cls)
    fields = [f for f in dataclasses.fields(cls) if f.name not in inner and f.name in meaning]
    if not fields:
        yield "It has no settings."
        return
    yield "| setting | default | meaning |"
    yield "|---|---|---|"
    for field in fields:
        text = meaning[field.name].replace("|", "\\|")
        yield f"| `{where}.{field.name}` | {_default(field)} | {text} |"


def _default(field: dataclasses.Field[Any]) -> str:
    value = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
    if value is dataclasses.MISSING:
        return "must be set"
    if value is None:
        return "not set"
    if dataclasses.is_dataclass(value):
        value = to_mapping(value)
    return f"`{_as_toml(value)}`".replace("|", "\\|")


def _as_toml(value: Any) -> str:
    """A value as it is written in a spec."""
    return tomli_w.dumps({"value": value}, multiline_strings=False).partition(" = ")[2].strip() or "{}"


def _inner(cls: type[Any]) -> Mapping[str, Names[type[Any]]]:
    return getattr(cls, "choices", {})
