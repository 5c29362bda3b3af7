"""The exceptions of fedbilevel.

FedBilevelError            everything this library raises on purpose
├── SettingsError          a setting is wrong: names field, value and remedy       (exit code 2)
│   ├── UnknownName        a name that is not in its table of names                (exit code 2)
│   ├── CorruptData        a cached or downloaded file that is not what it should be (exit code 2)
│   └── RunFolderError     the output folder holds another run, or is in use       (exit code 2)
├── DataUnavailable        no source for a data set could be reached               (exit code 1)
├── CheckpointError        a file of a run that is not as it was written           (exit code 1)
├── StorageError           the run folder could not be written                     (exit code 1)
├── StepError              a client step failed: names client, step and round      (exit code 1)
│   └── Refused            a site refuses a step by its policy or its budget       (exit code 1)
└── TooFewReplies          fewer valid replies than the federation needs           (exit code 1)
    └── Diverged           replies or losses that are not finite, or explode       (exit code 1)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

LONGEST = 300  # characters of a value or a reason in a message


def one_line(text: str, longest: int = LONGEST) -> str:
    """A text of any origin as one line of limited length without control characters, for a file or a terminal."""
    start = text[: 4 * longest]
    line = " ".join("".join(c if c.isprintable() else " " for c in start).split())
    return line if len(line) <= longest and len(start) == len(text) else f"{line[: longest - 3]}..."


def shown(value: Any) -> str:
    """A value as Python writes it, to stand within an error message."""
    try:
        return one_line(repr(value))
    except (ValueError, RecursionError):  # a number of too many digits; tables in tables
        return f"(a value of type {type(value).__name__}, too large to be shown)"


class FedBilevelWarning(UserWarning):
    """The base of the warnings of this library: it goes on, and says what it has assumed."""


class FedBilevelError(Exception):
    """The base of all errors that this library raises on purpose; `exit_code` is the command line's.

    `result` is the `Result` so far, if the error ended a run of `train`.
    """

    exit_code = 1
    result: Any = None


class SettingsError(FedBilevelError):
    """A setting is wrong; the message names the field, its value and a remedy."""

    exit_code = 2


class UnknownName(SettingsError):
    """A name that is not in its table of names."""

    def __init__(self, what: str, name: str, known: Iterable[str]) -> None:
        super().__init__(f"{what} {shown(name)} is unknown; use one of: {', '.join(sorted(known))}")


class CorruptData(SettingsError):
    """A cached or downloaded file whose contents are not what its name says."""


class RunFolderError(SettingsError):
    """The output folder holds another run or is in use by one, or cannot be written."""


class DataUnavailable(FedBilevelError):
    """No source for a data set could be reached."""


class CheckpointError(FedBilevelError):
    """A file of a run, such as a checkpoint, that is not as it was written, or belongs to another run."""


class StorageError(FedBilevelError):
    """The run folder could not be written in the middle of a run; files that were written before are intact."""


class StepError(FedBilevelError):
    """A client step failed; the message names the client, the step and the round."""


class Refused(StepError):
    """A site refuses a step by its policy or its budget. The message depends on requests, and on no data."""


class TooFewReplies(FedBilevelError):
    """A round got fewer valid replies than the federation needs."""


class Diverged(TooFewReplies):
    """Replies or losses that are not finite, or explode.

    fields    the vectors or losses that are not finite or explode
    numbers   the numbers that were sent in the round in which they occurred
    moved     the recursion (`Moves`) to which the first of the fields belongs, if that is known
    at_start  whether it happened before any step was taken, so that no step size is to blame
    """

    def __init__(
        self,
        message: str,
        fields: Iterable[str] = (),
        numbers: Mapping[str, float] | None = None,
        *,
        moved: Any = None,
        at_start: bool = False,
    ) -> None:
        super().__init__(message)
        self.fields, self.numbers = tuple(fields), dict(numbers or {})
        self.moved, self.at_start = moved, at_start

    def told(self, message: str) -> Diverged:
        """The same error with another message."""
        return Diverged(message, self.fields, self.numbers, moved=self.moved, at_start=self.at_start)
