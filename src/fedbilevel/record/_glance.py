"""A look at a run folder from outside, at any moment of its run.

The look changes nothing, and it trusts nothing that it finds. It opens fixed names only, follows no symbolic link,
waits for no pipe, and reads a bounded number of bytes however large a file is. What cannot be read is left out and
named in `troubles`, because a page about a run that is ill has to show the rest. `RunFolder` and `load_run` are
for those who go on with a run, and refuse a damaged file instead.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ..errors import RunFolderError, one_line
from ..reading import Excessive, Unreadable, parse_json, parse_toml
from ._folder import CHECKPOINTS, FEDERATION, LOCK
from ._lock import is_locked
from ._shapes import Books, Environment, Evaluation, Federation, Form, Summary, checked

if TYPE_CHECKING:
    from collections.abc import Iterator

Status = Literal["finished", "failed", "under way", "interrupted"]
SMALL = 4 << 20  # bytes of a file that is not a history
HISTORY = 16 << 20  # bytes of a history that is read whole
PLACES = 512  # of a longer history, lines are read at this many even places
PIECE = 16 << 10  # bytes that are read at each place; lines with many refusing clients are long
TROUBLES = 20  # more are not told


@dataclass(frozen=True)
class Glance:
    """What a run folder says at one moment.

    folder       the folder
    settings     what spec.toml says, as nested values
    status       how the run stands
    history      the evaluations, in their order
    whole        whether the history has all of them; of a very long one it has some, at even places
    books        the ledger as JSON values: of the last checkpoint, or of the end of the run
    at           the outer iteration after which the books were written
    summary      what summary.json says, if the run is over
    environment  what environment.json says
    federation   what federation.json says, for a run on a real federation
    written      when the history was last written, in seconds since 1970
    troubles     what could not be read, one line each
    """

    folder: Path
    settings: Mapping[str, Any] = field(default_factory=dict)
    status: Status = "interrupted"
    history: Sequence[Mapping[str, Any]] = ()
    whole: bool = True
    books: Mapping[str, Any] = field(default_factory=dict)
    at: int | None = None
    summary: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    federation: Mapping[str, Any] | None = None
    written: float | None = None
    troubles: tuple[str, ...] = ()


def status_of(in_use: bool, history: Sequence[Mapping[str, Any]], written: Mapping[str, Any] | None) -> Status:
    """How a run stands, whose folder a process has or not, and whose summary is this one, if it has one."""
    if in_use:
        return "under way"
    if written is None or (history and history[-1]["iteration"] > written["iterations"]):
        return "interrupted"  # the summary is that of a smaller budget, if there is one
    return "finished" if written.get("failure") is None else "failed"


def glance(folder: Path, in_use: bool | None = None) -> Glance:
    """Look at the run in a folder.

    `in_use` is whether a process has the folder; by default its lock tells. Raises `RunFolderError` if
    there is no folder, or no run in it.
    """
    try:
        place = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise RunFolderError(
            f"{folder} cannot be read: {error.strerror}; name the folder of a run, or put it back"
        ) from None
    try:
        return _Look(folder.resolve(), place).take(in_use)
    finally:
        os.close(place)


class _Look:
    """One look at a folder that is open, and what was wrong with it."""

    def __init__(self, folder: Path, place: int) -> None:
        self._folder, self._place = folder, place
        self._troubles: list[str] = []

    def take(self, in_use: bool | None) -> Glance:
        if not self._has("spec.toml"):
            raise RunFolderError(f"{self._folder} holds no run: there is no spec.toml in it; name a run folder")
        settings = self._whole("spec.toml", parse_toml) or {}
        history, whole, written = self._history()
        summary = self._json("summary.json", Summary)
        status = status_of(self._in_use() if in_use is None else in_use, history, summary)
        over = summary if status in ("finished", "failed") else None
        books, at = self._last_checkpoint()
        if over is not None and (final := self._of_summary(over)) is not None:
            books, at = books | final, over["iterations"]
        return Glance(
            folder=self._folder,
            settings=settings,
            status=status,
            history=history,
            whole=whole,
            books=books,
            at=at,
            summary=over,
            environment=self._json("environment.json", Environment) or {},
            federation=self._json(FEDERATION, Federation),
            written=written,
            troubles=tuple(self._troubles[:TROUBLES]),
        )

    # Files ------------------------------------------------------------------------------------------------

    def _has(self, name: str) -> bool:
        try:
            os.stat(name, dir_fd=self._place, follow_symlinks=False)
        except OSError:
            return False
        return True

    @contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        """A file of the folder, open for reading. Raises `Unreadable` for whatever is not a plain file."""
        try:
            # Not to block: opening a pipe would wait for whoever writes into it.
            file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=self._place)
        except OSError as error:
            if error.errno == errno.ELOOP:
                raise Unreadable("is a symbolic link, which is not followed") from None
            raise Unreadable(f"cannot be read: {error.strerror}") from None
        try:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                raise Unreadable("is not a file")
            yield file
        except OSError as error:
            raise Unreadable(f"cannot be read: {error.strerror}") from None
        finally:
            os.close(file)

    def _in_use(self) -> bool:
        """Whether a process has the folder at this moment."""
        try:
            with self._opened(LOCK) as file:
                return is_locked(file)
        except Unreadable:
            return False

    def _whole(self, name: str, parse: Any, most: int = SMALL) -> Any:
        """The value of a file, or None if it is not there or cannot be read."""
        if not self._has(name):
            return None
        try:
            with self._opened(name) as file:
                if os.fstat(file).st_size > most:
                    raise Excessive(f"is larger than {most >> 20} MB")
                return parse(os.pread(file, most, 0))
        except Unreadable as error:
            self._troubles.append(f"{name} {one_line(str(error))}")
            return None

    def _json(self, name: str, form: type[Form]) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._whole(name, lambda text: checked(parse_json(text), form))
        return found

    # The history ------------------------------------------------------------------------------------------

    def _history(self) -> tuple[list[dict[str, Any]], bool, float | None]:
        """Evaluations, whether these are all, and when the last was written."""
        if not self._has("history.jsonl"):
            return [], True, None
        try:
            with self._opened("history.jsonl") as file:
                about = os.fstat(file)
                whole = about.st_size <= HISTORY
                lines = os.pread(file, HISTORY, 0).split(b"\n")[:-1] if whole else _some(file, about.st_size)
        except Unreadable as error:
            self._troubles.append(f"history.jsonl {error}")
            return [], True, None
        found, broken = list[dict[str, Any]](), list[str]()
        for line in lines:
            try:
                found.append(checked(parse_json(line), Evaluation))
            except Unreadable as error:
                broken.append(one_line(str(error)))
        if broken:
            told = f"history.jsonl has {len(broken)} lines that cannot be read; the first of them {broken[0]}"
            self._troubles.append(told)
        return found, whole, about.st_mtime

    # The books --------------------------------------------------------------------------------------------

    def _last_checkpoint(self) -> tuple[dict[str, Any], int | None]:
        """The ledger in the header of the newest checkpoint, without its arrays, and its outer iteration."""
        name = CHECKPOINTS[0]
        if not self._has(name):
            return {}, None
        try:
            with self._opened(name) as file:
                length = int.from_bytes(os.pread(file, 8, 0), "little")
                if length > SMALL:
                    raise Excessive(f"has a header of more than {SMALL >> 20} MB")
                header = parse_json(os.pread(file, length, 8))
            about = header["__metadata__"]
            return checked(parse_json(about["ledger"]), Books), int(about["iteration"])
        except Unreadable as error:
            self._troubles.append(f"{name} {one_line(str(error))}")
        except (LookupError, TypeError, ValueError, AttributeError):
            self._troubles.append(f"{name} has no ledger in its header")
        return {}, None

    def _of_summary(self, summary: Mapping[str, Any]) -> dict[str, Any] | None:
        """The ledger that a summary has."""
        named = {"steps": "ledger"} | {name: name for name in ("rejected", "said", "exclusions", "forgotten")}
        found = {name: summary[key] for name, key in named.items() if key in summary}
        try:
            return checked({"rejected": {}, **found}, Books)
        except Unreadable as error:
            self._troubles.append(f"summary.json {error}")
            return None


def _some(file: int, size: int) -> list[bytes]:
    """Whole lines of a long file at even places, the first and the last among them."""
    lines: list[bytes] = []
    for turn in range(PLACES):
        start = (size - PIECE) * turn // (PLACES - 1)
        before, *inside = os.pread(file, PIECE, start).split(b"\n")
        whole = inside[:-1] if turn else [before, *inside[:-1]]  # the first and the last part may be half a line
        if whole:
            lines.append(whole[-1] if turn == PLACES - 1 else whole[0])
    return lines
