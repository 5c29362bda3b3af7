"""How a constant of the paper is declared: with its symbol, its formula and its place as fields."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, Self, TypeVar, overload

T = TypeVar("T")


class Entry(NamedTuple):
    """One constant with its value, for a table: symbol, value, formula, and place in the paper."""

    symbol: str
    value: float
    formula: str
    place: str


@dataclass(frozen=True, eq=False)
class Constant(Generic[T]):
    """One constant of the paper, which is computed from an object of type T.

    symbol   the paper's symbol
    formula  the right-hand side, in the paper's symbols
    place    the statement of the paper that has the formula, and a remark where we deviate from it
    compute  the function that evaluates the formula

    A constant is an attribute of the class T. On an object it is a number, which is computed when it is first
    read and then kept; on the class it is this declaration:

        theory.L_y          # 2.0
        Theory.L_y.formula  # "L_g / μ"
    """

    symbol: str
    formula: str
    place: str
    compute: Callable[[T], float] = field(repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "__doc__", f"{self.symbol} = {self.formula} [{self.place}]")  # for help()

    @overload
    def __get__(self, owner: None, kind: type[T]) -> Self: ...
    @overload
    def __get__(self, owner: T, kind: type[T] | None = None) -> float: ...
    def __get__(self, owner: T | None, kind: type[T] | None = None) -> Self | float:
        return self if owner is None else self.value(owner)

    def value(self, owner: T) -> float:
        """Return the value on one object, which is computed once and kept in the object's dictionary."""
        kept: dict[str, float] = vars(owner)
        name = self.compute.__name__
        if name not in kept:
            kept[name] = self.compute(owner)
        return kept[name]

    def entry(self, owner: T) -> Entry:
        """Return the constant with its value on one object."""
        return Entry(self.symbol, float(self.value(owner)), self.formula, self.place)


def constant(*, symbol: str, formula: str, place: str) -> Callable[[Callable[[T], float]], Constant[T]]:
    """Declare a constant. The decorated method evaluates the formula, and its name is the constant's name."""

    def declare(compute: Callable[[T], float]) -> Constant[T]:
        return Constant(symbol, formula, place, compute)

    return declare
