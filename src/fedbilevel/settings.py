"""Frozen dataclasses whose fields Pydantic checks, with errors that name the field, its value and a remedy.

A part of the library that has settings (an algorithm, a problem, a section of the run's spec) is such a
dataclass. Its fields are its settings, and each has its description beside it.
"""

from __future__ import annotations

import copy
import dataclasses
import datetime
import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Annotated, Any, TypeVar, cast, dataclass_transform, get_type_hints

import numpy as np
from pydantic import ConfigDict, Field, ValidationError
from pydantic.dataclasses import dataclass as pydantic_dataclass
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from .errors import SettingsError, one_line, shown
from .names import PYTHON, Names, address_of, lacking, locate, users_code
from .stepsizes import WORD, Automatic

T = TypeVar("T")
S = TypeVar("S")
PLAIN = (bool, int, float, list, tuple, datetime.date, datetime.time)  # TOML values other than strings and tables

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
Size = Annotated[int, Field(ge=1, le=10**6)]  # the size of something that is held in memory


def about(text: str) -> FieldInfo:
    """The meaning of a field, for `Annotated[...]`. `fedbilevel run --print-spec` shows it."""
    info: FieldInfo = Field(description=text)
    return info


@dataclass_transform(frozen_default=True, kw_only_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass that raises `SettingsError` on a wrong value.

    Types are strict, as in TOML: true is not the number 1, and "5" is not 5.
    """
    config = ConfigDict(extra="forbid", validate_default=True, strict=True, allow_inf_nan=False)
    made: Any = pydantic_dataclass(frozen=True, kw_only=True, config=config)(cls)
    init = made.__init__

    @functools.wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            init(self, *args, **_plain(kwargs))
        except ValidationError as error:
            raise _translate(made, error, made.__name__) from None

    made.__init__ = checked
    return made


def from_mapping(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Build a settings class from parsed TOML; errors name `where.field`.

    A class with the attribute `rest` takes any other key too. They are together in the field of that name.
    """
    rest: str | None = getattr(cls, "rest", None)
    if rest is not None:
        known = {field.name for field in dataclasses.fields(cast(Any, cls))} - {rest}
        more = {key: value for key, value in values.items() if key not in known}
        values = {key: value for key, value in values.items() if key in known} | {rest: more}
    made: Any = cls.__new__(cls)
    try:
        inspect.unwrap(cls.__init__)(made, **_plain(values))  # not wrapped, so that the error names `where`
    except ValidationError as error:
        raise _translate(cls, error, where) from None
    return cast(T, made)


def choose(table: Names[type[Any]], given: Any, where: str) -> Any:
    """The settings object that a table of a spec stands for.

    `name` chooses the class, and the other keys are its fields. A bare name is a table with nothing else. The name
    "python" uses the class at the address `class`. An object that TOML cannot express is returned unchanged.
    """
    if isinstance(given, str):
        given = {"name": given}
    if given is None or isinstance(given, PLAIN):
        known = ", ".join(sorted(table))
        raise SettingsError(f"{where} = {shown(given)} is wrong: use one of: {known}; or a table with such a name")
    if not isinstance(given, Mapping):
        return given
    values = dict(given)
    name = values.pop("name", next(iter(table)))
    if name == PYTHON and (name not in table or "class" in values):
        if "class" not in values:
            raise SettingsError(f"{where}.class is missing, and {where}.name is 'python'; set it to module:class")
        address = values.pop("class")
        cls = locate(address, f"{where}.class")
        if not is_settings(cls):
            raise SettingsError(
                f"{where}.class = {shown(address)} is wrong: it is not a settings class; "
                "decorate it with fedbilevel.settings"
            )
    else:
        if not isinstance(name, str):
            raise SettingsError(f"{where}.name = {shown(name)} is wrong: use one of: {', '.join(sorted(table))}")
        address, cls = name, table[name]
    if not isinstance(cls, type):
        raise SettingsError(f"{where} = {shown(address)} is wrong: it is not a class; name a settings class")
    if missing := lacking(table, cls):
        raise SettingsError(
            f"{where} = {shown(address)} is wrong: it lacks {', '.join(missing)}, which all {table.kind} have"
        )
    with users_code(f"{where} = {shown(address)} is wrong: making it raises "):
        return from_mapping(cls, values, where)


def named(table: Names[type[Any]], value: Any, changed: bool = False) -> dict[str, Any]:
    """The table of a spec that stands for a settings object; the inverse is `choose`."""
    fields = to_mapping(value, changed) if is_settings(type(value)) else {}
    for name in table:
        if table[name] is type(value):
            return {"name": name, **fields}
    return {"name": PYTHON, "class": address_of(type(value)), **fields}


def is_settings(cls: Any) -> bool:
    """Whether a class was made by `settings`, or is derived from such a class and adds no fields."""
    if not isinstance(cls, type) or not dataclasses.is_dataclass(cls):
        return False
    made = next(base for base in cls.__mro__ if "__dataclass_fields__" in vars(base))
    between = cls.__mro__[: cls.__mro__.index(made)]
    return "__pydantic_fields__" in vars(made) and not any(vars(base).get("__annotations__") for base in between)


def to_mapping(value: Any, changed: bool = False) -> dict[str, Any]:
    """The fields as plain TOML values. Fields that are None are omitted, because TOML has no null.

    `changed` also omits values that are defaults. A field that chooses among classes (`choices`) is a table, and
    so are settings within settings. Of an object that TOML cannot express, only its class is told.
    """
    choices: Mapping[str, Names[type[Any]]] = getattr(type(value), "choices", {})
    made: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        own, default = getattr(value, field.name), _default(field)
        if own is None or (changed and own == default):
            continue
        if field.name == getattr(type(value), "rest", None):
            made |= own
        elif field.name in choices:
            made[field.name] = named(choices[field.name], own, changed)
        elif isinstance(own, Automatic):
            made[field.name] = WORD
        elif is_settings(type(own)):
            made[field.name] = to_mapping(own, changed)
        elif isinstance(own, (str, dict, *PLAIN)) and not hasattr(own, "_fields"):
            made[field.name] = list(own) if isinstance(own, tuple) else own
        else:
            made[field.name] = {"name": PYTHON, "class": address_of(type(own))}
    return made


def numbers_of(value: Any) -> dict[str, float]:
    """The settings of an object that are numbers with a point, by name; those of settings within it have a dot.

    Of an object whose settings are not known, there are none.
    """
    if not dataclasses.is_dataclass(value):
        return {}
    found: dict[str, float] = {}
    for field in dataclasses.fields(value):
        own = getattr(value, field.name)
        if isinstance(own, float):
            found[field.name] = own
        elif is_settings(type(own)):
            found |= {f"{field.name}.{name}": number for name, number in numbers_of(own).items()}
        elif isinstance(own, dict) and field.name == getattr(type(value), "rest", None):
            found |= {name: number for name, number in own.items() if isinstance(number, float)}
    return found


def with_numbers(value: S, numbers: Mapping[str, Any]) -> S:
    """The object with other values of some of its `numbers_of`. They are not checked, so they may be traced."""
    if not numbers:
        return value
    made = copy.copy(value)
    for name, field in type(value).__dict__.items():
        if isinstance(field, functools.cached_property):
            made.__dict__.pop(name, None)  # it was made of the earlier values
    inner: dict[str, dict[str, Any]] = {}
    rest: str | None = getattr(type(value), "rest", None)
    for name, number in numbers.items():
        first, dot, others = name.partition(".")
        if dot:
            inner.setdefault(first, {})[others] = number
        elif rest is not None and name in getattr(made, rest):
            object.__setattr__(made, rest, {**getattr(made, rest), name: number})
        else:
            object.__setattr__(made, name, number)
    for name, own in inner.items():
        object.__setattr__(made, name, with_numbers(getattr(made, name), own))
    return made


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


def meanings(cls: type[Any]) -> dict[str, str]:
    """The description of every field of a settings class."""
    found = {}
    for name, hint in get_type_hints(cls, include_extras=True).items():
        notes = [m.description for m in getattr(hint, "__metadata__", ()) if isinstance(m, FieldInfo)]
        found[name] = next((n for n in notes if n), "")
    return found


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with lists as tuples, which frozen fields keep, and NumPy numbers as Python numbers."""
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in values.items()}
    return {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}


def _translate(cls: type[Any], error: ValidationError, where: str) -> SettingsError:
    known = [f.name for f in dataclasses.fields(cls)]
    return SettingsError("; ".join(dict.fromkeys(_line(e, where, known) for e in _first_of_each(error))))


def _first_of_each(error: ValidationError) -> list[ErrorDetails]:
    """One error for each field. A union reports all of its branches, and the last one says what is allowed."""
    by_field: dict[str, ErrorDetails] = {}
    for detail in error.errors():
        by_field[str(detail["loc"][0]) if detail["loc"] else ""] = detail
    return list(by_field.values())


def _line(detail: ErrorDetails, where: str, known: list[str]) -> str:
    field = str(detail["loc"][0]) if detail["loc"] else ""
    name = one_line(f"{where}.{field}") if field else where
    if detail["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        return f"{name} is not a setting; {suggestion(field, known)}"
    value = list(detail["input"]) if isinstance(detail["input"], tuple) else detail["input"]
    message = detail["msg"].removeprefix("Value error, ")
    message = message[0].lower() + message[1:]
    if isinstance(value, Automatic) or (value == WORD and "number" in message + detail["type"]):
        message = "this setting cannot be found automatically; give a number"
    return f"{name} = {shown(value)} is wrong: {message}" if field else f"{name}: {message}"


def suggestion(name: str, known: list[str]) -> str:
    """A remedy for a name that is not known."""
    by_lower = {k.lower(): k for k in known}
    near = difflib.get_close_matches(name.lower(), by_lower, 1)
    return f"did you mean {by_lower[near[0]]}?" if near else f"use one of: {', '.join(known)}"
