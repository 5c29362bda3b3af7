"""What a logger is, what it is told, and what the loggers of this library share."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from numbers import Real
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from ..errors import SettingsError
from ..files import make_folder, write_whole
from ..reading import Unreadable, read_json

FROM_HISTORY = ("accuracy", "rounds_to", "bytes_to", "seconds_to")  # tables of a summary that the history implies


@dataclass(frozen=True)
class LoggedRun:
    """What a logger is told about a run when the run starts or is resumed.

    title     the run in one line
    settings  the settings as nested values, as spec.toml has them
    folder    the run folder, or None if the run has none
    history   the lines that the history has already: none for a new run
    """

    title: str
    settings: Mapping[str, Any]
    folder: Path | None
    history: tuple[Mapping[str, Any], ...] = ()

    @property
    def name(self) -> str:
        """A short name: that of the folder, or else the title."""
        return self.title if self.folder is None else self.folder.resolve().name


class Log(Protocol):
    """A log that is open, and is told about one run."""

    def log(self, record: Mapping[str, Any], /) -> None:
        """Take a line of the history. It is all that a log is told until the end, also of a private run."""

    def finish(self, summary: Mapping[str, Any] | None, /) -> None:
        """Take the summary, and close the log.

        A run that failed has the reason as `summary["failure"]`. The summary is None if the run was interrupted;
        it may be resumed.
        """


@runtime_checkable
class Logger(Protocol):
    """A logger. An error that it raises never ends a run: it is told once, and the logger is told nothing more."""

    def start(self, run: LoggedRun, /) -> Log:
        """Open a log for this run. A logger that is used for one run only may return itself."""


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of every number in a record of the history.

    A number in a nested mapping has the joined keys as its name, such as `rejected/reason/no answer`. Values
    that are not numbers are excluded.
    """
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def outcome(summary: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a summary that the history implies, under names such as `summary/accuracy/best`."""
    tables = {key: summary[key] for key in FROM_HISTORY if key in summary}
    return dict(scalars({"summary": tables}))


def need_extra(name: str, module: str) -> None:
    """Raise if the package of a logger is not installed. It is not imported, because that takes seconds."""
    if find_spec(module) is None:
        raise SettingsError(f"logger {name} needs an extra: pip install 'fedbilevel[{name}]'")


def recall(run: LoggedRun, name: str) -> dict[str, Any]:
    """What `remember` wrote for this run when it was started; empty for a new run."""
    if run.folder is None or not _note(run.folder, name).exists():
        return {}
    path = _note(run.folder, name)
    try:
        found = read_json(path)
    except Unreadable as error:
        raise SettingsError(f"{path} {error}; delete it, and the log starts anew") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{path} is not a table; delete it, and the log starts anew")
    return found


def remember(run: LoggedRun, name: str, values: Mapping[str, Any]) -> None:
    """Write down how the log of this run is found, so that the run can go on with it when it is resumed."""
    if run.folder is not None:
        path = _note(run.folder, name)
        make_folder(path.parent)
        write_whole(path, (json.dumps(values, indent=2) + "\n").encode(), path.with_name(f".{path.name}.tmp"))


def _note(folder: Path, name: str) -> Path:
    return folder / name / "run.json"
