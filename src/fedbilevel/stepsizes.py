"""What a step size moves. It is declared once, and a run that diverges then names the setting that is to blame.

    beta: Annotated[float, Moves.LOWER, about("lower step size")] = 0.1       on a setting of a method
    L_g: Annotated[float, Inverse(Moves.PRODUCT), about("bound")] = 10.0      if it is one over the step size
    s: Annotated[Y, Moves.PRODUCT]                                            on a field of a reply

A field of a reply needs a mark only if its kind does not say what moves it, see `ReplyField.moved`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from operator import attrgetter
from typing import Any, NamedTuple, Protocol, get_type_hints, runtime_checkable


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
    try:
        hints = get_type_hints(type(method), include_extras=True)
    except NameError:  # an annotation that only a type checker can resolve
        return []
    found = []
    for name, hint in hints.items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, Moves | Inverse) and isinstance(getattr(method, name, None), float):
                inverse = isinstance(note, Inverse)
                found.append(StepSize(name, note.moves if isinstance(note, Inverse) else note, inverse))
    return found
