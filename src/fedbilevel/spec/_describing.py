"""A spec as TOML with the meaning of every setting beside it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import tomli_w

from ..names import Names
from ..settings import meanings, named, to_mapping
from ._spec import CHOSEN, ORDER, Spec


def describe(spec: Spec) -> str:
    """The spec as TOML with the meaning of every field beside it. Fields that are not set are comments."""
    lines = [f"seed = {spec.seed}  # the root of all randomness"]
    for section in ORDER:
        lines += _table(section, getattr(spec, section), CHOSEN.get(section))
    return "\n".join(lines) + "\n"


def _table(name: str, value: Any, table: Names[type[Any]] | None) -> Iterator[str]:
    """The lines of one table, and of the tables in it."""
    cls = type(value)
    choices: dict[str, Names[type[Any]]] = getattr(cls, "choices", {})
    set_values = to_mapping(value)
    yield ""
    yield f"# {((cls.__doc__ or cls.__name__).strip() or cls.__name__).splitlines()[0]}"
    yield f"[{name}]"
    if table is not None:
        tag = named(table, value)
        yield f"name = {_toml(tag['name'])}  # one of: {', '.join(dict.fromkeys([*table, 'python']))}"
        if "class" in tag:
            yield f"class = {_toml(tag['class'])}  # the address of a settings class"
    known = {field.name for field in dataclasses.fields(cls)}
    for field, meaning in meanings(cls).items():
        if field not in known or field in choices:
            continue
        if field == getattr(cls, "rest", None):
            own = getattr(value, field)
            yield from (f"{_key(key)} = {_toml(inner)}  # {meaning}" for key, inner in own.items())
            if not own:
                yield f"# {field} =   # {meaning}"
        elif field in set_values:
            yield f"{field} = {_toml(set_values[field])}  # {meaning}"
        else:
            yield f"# {field} =   # {meaning}"
    for field, inner in choices.items():
        yield from _table(f"{name}.{field}", getattr(value, field), inner)


def _key(name: str) -> str:
    return tomli_w.dumps({name: 0}).removesuffix(" = 0\n")


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(name)} = {_toml(v)}' for name, v in value.items())} }}"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    return tomli_w.dumps({"v": value}).removeprefix("v = ").rstrip("\n")
