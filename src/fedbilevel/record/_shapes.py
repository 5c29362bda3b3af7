"""What the files of a run folder must have for those who read them.

Each form has the fields that this library reads; a file may have more. A record that lacks one of them, or has it
with another type, was not written by this library, or was damaged.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..errors import one_line, shown
from ..reading import Unreadable

T = TypeVar("T", bound="Form")
Counted = Annotated[int, Field(ge=0)]
Number = float | None  # None where a number is not finite, or was not measured


class Form(BaseModel):
    """The fields of a record that are read, with their types."""

    model_config = ConfigDict(strict=True, extra="allow")


class Evaluation(Form):
    """A line of the history."""

    iteration: Counted
    rounds: Counted
    bytes_up: Counted
    bytes_down: Counted
    seconds: float
    test_accuracy: Number


class Accuracies(Form):
    """The accuracies of a summary."""

    last: Number
    best: Number
    mean: Number = None  # absent where an older version has written the summary


class Summary(Form):
    """The file summary.json."""

    rounds: Counted
    iterations: Counted
    rounds_to: dict[str, Counted | None]
    accuracy: Accuracies
    ledger: dict[str, dict[str, Any]]
    failure: str | None = None


class Environment(Form):
    """The file environment.json."""

    revision: str | None


class Federation(Form):
    """The file federation.json."""

    run: str
    sites: Annotated[list[str], Field(min_length=1)]
    jobs: list[dict[str, Any]]


class Spent(Form):
    """What the rounds of a step cost, in the ledger."""

    rounds: Counted
    bytes_up: Counted
    bytes_down: Counted
    seconds: float
    rejected: Counted
    wire_up: Counted = 0
    wire_down: Counted = 0


class Excluded(Form):
    """A client that was excluded, in the ledger."""

    client: Counted
    round: Counted
    until: Counted


class Books(Form):
    """The ledger, as a checkpoint and a summary have it."""

    steps: dict[str, Spent]
    rejected: dict[str, dict[str, dict[str, Counted]]]  # by step, client and reason
    said: dict[str, list[str]] = {}
    exclusions: list[Excluded] = []
    forgotten: dict[str, Counted] = {}
    silent: dict[str, list[int | str]] = {}  # a round, the number of replies, and the reason


class Sources(Form):
    """The file sources.json."""

    sources: dict[str, str]
    changes: list[dict[str, Any]]


def checked(value: Any, form: type[Form]) -> dict[str, Any]:
    """The value, if it is a table of this form. Raises `Unreadable` with the first field that is not."""
    if not isinstance(value, Mapping):
        raise Unreadable(f"is {shown(value)} instead of a table")
    try:
        form.model_validate(value)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise Unreadable(f"has {one_line(field)}: {first['msg'][0].lower()}{first['msg'][1:]}") from None
    return dict(value)
