"""The replies of clients. The annotation of a field says what the field is.

    class Moved(NamedTuple):
        q: Y                  a vector with the components of y, averaged over clients: a value or a direction
        y: Next[Y]            the new value of the vector y that the client was given
        momentum: Own[X]      kept by the client and given back to its next step; it is never sent
        w: Own[W]             the new value of the client's own variables (`Problem.own`), which it keeps as well

So the server can check a reply before it has seen another one, and everything that treats a client's contribution
(clipping, noise, robust rules, attacks) knows what the contribution is: the field itself, or for `Next` the
difference to the vector of the same name. If the client was given None instead of that vector, the contribution is
the field itself.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Any, NamedTuple, TypeVar, get_args, get_type_hints

from jax import Array

from ..errors import SettingsError
from ..stepsizes import Moves

T = TypeVar("T")


class Form(Enum):
    """The components that a field has: those of x or y, one number, or a matrix over them."""

    X = "x"
    Y = "y"
    SCALAR = "scalar"
    SCALARS = "scalars"  # several numbers, as many as the step is asked for
    XY = "xy"  # a matrix with a row for each component of x and a column for each of y
    YY = "yy"  # a stack of matrices with rows and columns for the components of y
    W = "w"  # the variables that belong to the client, as many as it has; they are never sent

    def shape(self, p: int, q: int) -> tuple[int, ...]:
        """The shape for p components of x and q of y; of a stack, that of one matrix."""
        return {Form.X: (p,), Form.Y: (q,), Form.SCALAR: (), Form.XY: (p, q), Form.YY: (q, q)}[self]


class Role(Enum):
    """What is done with a field."""

    VALUE = "value"  # it is sent, and is the contribution itself
    NEXT = "next"  # it is sent, and the contribution is the difference to the vector that the client was given
    OWN = "own"  # it stays with the client


X = Annotated[Array, Form.X]
Y = Annotated[Array, Form.Y]
Scalar = Annotated[Array, Form.SCALAR]
Scalars = Annotated[Array, Form.SCALARS]
XY = Annotated[Array, Form.XY]
YY = Annotated[Array, Form.YY]
W = Annotated[Array, Form.W]
Next = Annotated[T, Role.NEXT]
Own = Annotated[T, Role.OWN]


class ReplyField(NamedTuple):
    """One field of a reply. `form` is None only for `Own` fields, which may be any pytree of arrays.

    moved   the recursion to blame if the field is not finite: as its annotation says, or else by its kind. The new
            value of x is moved by the upper step, that of y by the lower one, and that of another vector with the
            components of y by the step of the Hessian product. A derivative with the components of y is taken
            where the lower step has led, and one with those of x has a Hessian product in it.
    """

    role: Role
    form: Form | None
    moved: Moves | None = None


def reply_fields(step: str, reply: Any) -> dict[str, ReplyField]:
    """The fields of a reply's NamedTuple, read off its annotations."""
    if not hasattr(reply, "_fields"):
        raise SettingsError(f"step {step} returns {reply}; annotate it with the NamedTuple of its reply")
    fields = {}
    for name, hint in get_type_hints(reply, include_extras=True).items():
        notes = [note for part in (hint, *get_args(hint)) for note in getattr(part, "__metadata__", ())]
        role = next((note for note in notes if isinstance(note, Role)), Role.VALUE)
        form = next((note for note in notes if isinstance(note, Form)), None)
        if form is None and role is not Role.OWN:
            raise SettingsError(
                f"step {step}: field {name} of its reply has no kind; annotate it with X, Y or Scalar, "
                "with Next[...] around it if it is a vector's new value"
            )
        if form is Form.W and role is not Role.OWN:
            raise SettingsError(
                f"step {step}: field {name} of its reply has the client's own variables, which are never sent; "
                "annotate it with Own[W]"
            )
        marked = next((note for note in notes if isinstance(note, Moves)), None)
        fields[name] = ReplyField(role, form, marked or _moved(name, role, form))
    return fields


def _moved(name: str, role: Role, form: Form | None) -> Moves | None:
    if role is Role.OWN or form in (None, Form.SCALAR, Form.SCALARS):
        return None
    if role is Role.NEXT:
        return Moves.UPPER if form is Form.X else Moves.LOWER if name == "y" else Moves.PRODUCT
    return Moves.PRODUCT if form is Form.X else Moves.LOWER


def present(reply: Any) -> list[str]:
    """The fields that a reply has; the others are None."""
    return [name for name, value in reply._asdict().items() if value is not None]
