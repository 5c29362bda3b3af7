"""How a method enters comparisons: declared on the annotations of its settings, so that a method is one file.

    tau: Annotated[Count, Tried(5, 20), about("local steps")] = 1            both values are tried
    lower_steps: Annotated[Count | None, Tried(5), about("...")] = None      comparisons use this value
    control: Annotated[Literal["joint", "lower-only"], apart, about("...")]  each value is a method of its own
    batch: Annotated[Count | Literal["full"], Rows(), about("...")] = 10     the rows of a draw; a problem sets it

What a step size moves is declared with `Moves` (`stepsizes.py`), and comparisons search all of these. A method
without any of these marks is compared by its step sizes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints


class Tried:
    """The mark of a setting of which these values are tried in comparisons."""

    def __init__(self, *values: Any) -> None:
        self.values = values


@dataclass(frozen=True)
class Rows:
    """The mark of a setting that says how many rows a draw has: a number, or "full"."""


class Apart:
    """The kind of the mark `apart`: each value of a `Literal` is a method of its own in comparisons."""


apart = Apart()


@dataclass(frozen=True)
class Trials:
    """What a class of methods declares.

    tried   the values that are tried, by setting
    apart   the values of which each is a method of its own, by setting
    rows    the settings that say how many rows a draw has
    """

    tried: dict[str, tuple[Any, ...]]
    apart: dict[str, tuple[Any, ...]]
    rows: tuple[str, ...]


def trials_of(cls: type[Any]) -> Trials:
    """The marks on the settings of a class of methods."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # an annotation that only a type checker can resolve
        hints = {}
    marks = {name: tuple(getattr(hint, "__metadata__", ())) for name, hint in hints.items()}
    tried = {name: m.values for name, all_ in marks.items() for m in all_ if isinstance(m, Tried)}
    own = [name for name, all_ in marks.items() if any(isinstance(m, Apart) for m in all_)]
    rows = tuple(name for name, all_ in marks.items() if any(isinstance(m, Rows) for m in all_))
    return Trials(tried, {name: _values(hints[name]) for name in own}, rows)


def _values(hint: Any) -> tuple[Any, ...]:
    inner = get_args(hint)[0]
    return get_args(inner) if get_origin(inner) is Literal else ()
