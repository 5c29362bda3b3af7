"""What a step size moves. It is declared once, and a run that diverges then names the setting that is to blame.

    beta: Annotated[float, Moves.LOWER, about("lower step size")] = 0.1       on a setting of a method
    L_g: Annotated[float, Inverse(Moves.PRODUCT), about("bound")] = 10.0      if it is one over the step size
    s: Annotated[Y, Moves.PRODUCT]                                            on a field of a reply

A field of a reply needs a mark only if its kind does not say what moves it, see `ReplyField.moved`.

A setting with the mark `automatic` may be "auto" in a spec, or `AUTO` from Python. The run then measures the lower
problem before its first outer iteration, and replaces it by a number (`fedbilevel.advisor`).

    beta: Annotated[Positive, Moves.LOWER, automatic, about("lower step size")] = 0.1
    lam: Annotated[Positive, Moves.PRODUCT, alone, automatic, about("...")]   if each client uses its own Hessian
    T: Annotated[Count, Terms(0), automatic, about("...")]                    the length of the series of products
    N: Annotated[Count, LowerRounds(), automatic, about("...")]               the length of the lower loop
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from functools import cache
from operator import attrgetter
from typing import Any, Final, NamedTuple, Protocol, TypeVar, get_type_hints, runtime_checkable

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema

M = TypeVar("M")
K = TypeVar("K")
WORD = "auto"  # how a spec writes a value that is to be found


class Moves(Enum):
    """The recursion that a step size s belongs to. Its value is the largest s L, with L the norm of ∇²_y g.

    Beyond 2, gradient descent on a loss of curvature L moves away from the solution. The series of Hessian
    products converges up to 2 as well, but methods that correct it by their neighbours do not, and theory asks
    for at most 1. No such bound is known for the upper problem.
    """

    LOWER = 2.0  # y ← y - s ∇_y g
    PRODUCT = 1.0  # z ← z - s ∇²_y g z
    UPPER = None  # x ← x - s h


@dataclass(frozen=True)
class Inverse:
    """The mark of a setting of which the step size is the inverse, such as a bound on the curvature."""

    moves: Moves


class Automatic(float):
    """The value of a setting that is not a number yet. It prints as "auto", and arithmetic with it gives NaN."""

    __slots__ = ()

    def __new__(cls) -> Automatic:
        return super().__new__(cls, "nan")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Automatic)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(WORD)

    def __repr__(self) -> str:
        return WORD

    __str__ = __repr__

    def __format__(self, how: str) -> str:
        return WORD

    def __reduce__(self) -> tuple[type[Automatic], tuple[()]]:
        return Automatic, ()


AUTO: Final[Any] = Automatic()  # any setting with the mark `automatic` takes it, also one that is a whole number


class MayBeAutomatic:
    """The kind of the mark `automatic`, which lets Pydantic take "auto" where it would ask for a number."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_wrap_validator_function(
            lambda value, number: AUTO if value in (WORD, AUTO) else number(value), handler(source)
        )


automatic = MayBeAutomatic()


class Alone:
    """The kind of the mark `alone`: every client goes along its own recursion, with its own Hessian."""


alone = Alone()


@dataclass(frozen=True)
class Terms:
    """The mark of a count n, if the Neumann series of Hessian products has n + `more` terms."""

    more: int


@dataclass(frozen=True)
class LowerRounds:
    """The mark of a count that is the number of lower rounds of an outer iteration."""


@dataclass(frozen=True)
class Momentum:
    """The mark of the momentum of y over the lower rounds."""


@dataclass(frozen=True)
class Pairs:
    """The mark of the number of pairs that the server keeps for quasi-Newton steps of y."""


@dataclass(frozen=True)
class Decays:
    """The mark of a setting that a schedule multiplies by a power of its factor, as it does with step sizes.

    Step sizes of x and y need no mark. That of a product needs one if its recursion goes on from one outer
    iteration to the next.
    """

    power: float = 1.0


class StepSize(NamedTuple):
    """A step size among the settings of a method."""

    setting: str
    moves: Moves
    inverse: bool = False


@runtime_checkable
class Limited(Protocol):
    """A method in which a step size has another limit than the value of `Moves`."""

    def limit(self, moves: Moves, clients: int) -> float | None:
        """The largest s L for a step size s, with this many registered clients; None if none is known."""


@runtime_checkable
class Deciding(Protocol):
    """A method some of whose settings decide which step sizes it uses."""

    def in_use(self, declared: list[StepSize]) -> list[StepSize]:
        """Of the declared step sizes those that are used, and others, such as "upper.learning_rate"."""


def value_of(method: Any, setting: str) -> float:
    """The value of a setting, which may be within another one, as in "upper.learning_rate"."""
    value: float = attrgetter(setting)(method)
    return value


def step_sizes(method: Any) -> list[StepSize]:
    """The step sizes that a method declares on the annotations of its settings, whatever kind of class it is."""
    return method.in_use(_declared(method)) if isinstance(method, Deciding) else _declared(method)


def _declared(method: Any) -> list[StepSize]:
    found = []
    kind: Any = type(method)
    for name, notes in _marks(kind).items():
        for note in notes:
            if isinstance(note, Moves | Inverse) and isinstance(getattr(method, name, None), float):
                inverse = isinstance(note, Inverse)
                found.append(StepSize(name, note.moves if isinstance(note, Inverse) else note, inverse))
    return found


def marks_of(method: Any, setting: str) -> tuple[Any, ...]:
    """The marks on the annotation of a setting."""
    kind: Any = type(method)
    return _marks(kind).get(setting, ())


def marked(method: Any, kind: type[K]) -> dict[str, K]:
    """The settings of a method that are numbers and have a mark of a kind, each with its mark."""
    own: Any = type(method)
    return {
        name: mark
        for name, marks in _marks(own).items()
        for mark in marks
        if isinstance(mark, kind) and isinstance(getattr(method, name, None), float)
    }


@cache
def _marks(cls: Any) -> dict[str, tuple[Any, ...]]:
    """The marks on all annotations of a class."""
    try:
        hints = get_type_hints(cls, include_extras=True)
    except NameError:  # an annotation that only a type checker can resolve
        return {}
    return {name: tuple(getattr(hint, "__metadata__", ())) for name, hint in hints.items()}


def automatic_settings(method: Any) -> tuple[str, ...]:
    """The settings of a method that are "auto"."""
    if not is_dataclass(method):
        return ()
    return tuple(each.name for each in fields(method) if isinstance(getattr(method, each.name), Automatic))


def with_values(method: M, values: Mapping[str, float]) -> M:
    """The method with other values of some settings."""
    made: M = replace(method, **values) if values else method  # type: ignore[type-var]
    return made
