"""The loggers of one run, and the guard that keeps their errors away from it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

from ..errors import FedBilevelError, one_line
from ._base import Log, LoggedRun, Logger

T = TypeVar("T")
messages = logging.getLogger("fedbilevel")  # without handlers, Python prints a warning as one line


class Logs:
    """The loggers of one run. Whatever one of them raises is told in one line, and the run goes on without it."""

    def __init__(self, loggers: Sequence[Logger]) -> None:
        self._loggers = tuple(loggers)
        self._open: list[Log] = []

    def start(self, run: LoggedRun) -> None:
        """Open the logs of a run."""
        for logger in self._loggers:
            opened = _guarded(logger, "start", partial(logger.start, run))
            if opened is not None:
                self._open.append(opened)

    def log(self, record: Mapping[str, Any]) -> None:
        """Give a line of the history to all logs, each its own copy."""
        for log in [*self._open]:
            if not _guarded(log, "log", partial(_log, log, {**record})):
                self._open.remove(log)
                with suppress(Exception, SystemExit):  # one line about this logger is enough
                    log.finish(None)

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        """Close the logs that are open; a second call does nothing."""
        logs, self._open = self._open, []
        for log in logs:
            _guarded(log, "finish", partial(log.finish, None if summary is None else {**summary}))

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.finish(None)  # the run was interrupted: otherwise its summary has closed them


def _log(log: Log, record: Mapping[str, Any]) -> bool:
    """Give a log a record; True says that it was taken, since `_guarded` gives None after an error."""
    log.log(record)
    return True


def _guarded(thing: object, what: str, call: Callable[[], T]) -> T | None:
    """The result of a call to a logger, or None if it raised an error, which is told."""
    try:
        return call()
    except (Exception, SystemExit) as error:
        told = str(error) if isinstance(error, FedBilevelError) else f"{type(error).__name__}: {error}"
        messages.warning(
            "%s", f"{type(thing).__name__} logs nothing more: {what} raises {one_line(told)}; the run goes on"
        )
        return None
