"""What the program of an algorithm depends on, so that runs that differ in numbers only can share it."""

from __future__ import annotations

import dataclasses
from typing import Any

from ..algorithms import Algorithm
from ..settings import numbers_of


def structure_of(algorithm: Algorithm) -> Any:
    """Everything that the program of an algorithm depends on, apart from the numbers that may be values of it."""
    if not dataclasses.is_dataclass(algorithm):
        return id(algorithm)
    numbers = numbers_of(algorithm)
    zero = tuple(sorted(name for name, value in numbers.items() if value == 0.0))  # a momentum of zero is none
    rest = []
    for each in dataclasses.fields(algorithm):
        value = getattr(algorithm, each.name)
        if isinstance(value, float):
            continue
        inner, arguments = numbers_of(value), getattr(value, "arguments", None)
        if inner and isinstance(arguments, dict):
            rest.append((value.name, *(_plain(a) for n, a in sorted(arguments.items()) if n not in inner)))
        else:
            rest.append((_plain(value),))
    return type(algorithm), tuple(sorted(numbers)), zero, tuple(rest)


def _plain(value: Any) -> Any:
    """The value, if it can be compared as a whole; otherwise only the same object is equal to it."""
    plain = value is None or isinstance(value, str | int | float | bool)
    if isinstance(value, tuple):
        return tuple(_plain(each) for each in value)
    return (type(value).__name__, value) if plain else id(value)
