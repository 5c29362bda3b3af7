"""The books of a private run: every release has a line, which is on disk before the release is used.

Checkpoints go back in time, and these books do not. A run that is resumed from an older checkpoint, that goes back
after a divergence, or that continues in another job has released what it has released. A release that is repeated
bit for bit tells nothing new and is booked once.

The vectors that one cohort uploads are booked together under the round in which the cohort was drawn. A round that
is repeated with another result has the same cohort, so its vectors are added to those of the first time: the
amplification by the draw of the cohort then counts once for all of them.
"""

from __future__ import annotations

import json
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import CheckpointError, SettingsError, StorageError
from ..files import write_whole

NAME = 64  # the longest name of a run


class CohortUploads(NamedTuple):
    """Central privacy: the number of clients drawn together, and the number of vectors that each uploaded."""

    cohort: int
    vectors: int


class ClientUploads(NamedTuple):
    """Local privacy: one client, which is charged for each of its uploads."""

    client: int


Release = CohortUploads | ClientUploads


class Entry(NamedTuple):
    """One round of a private run.

    drawn     the round in which the cohort was drawn
    cohort    the number of its clients
    clients   who they are; empty with central privacy, where the cohort stays secret
    vectors   the number of vectors that each of them uploaded
    release   a digest of the call and of its result
    """

    drawn: int
    cohort: int
    clients: tuple[int, ...]
    vectors: int
    release: str


class Books:
    """The entries of a run, in memory and in files.

    files   every entry is in all of these files (default: in none); what one lacks is copied from the others
    name    the random name of the run, on which its secret depends (default: that of the files, or a new one)
    lines   all entries so far as JSON values, in the order in which they were booked; those that are given are
            from another process
    """

    def __init__(self, files: Sequence[Path] = (), name: str | None = None, lines: Iterable[Any] = ()) -> None:
        found = [_read(file) for file in files if file.exists()]
        names = {own for own, _ in found} | ({name} if name is not None else set())
        if len(names) > 1:
            raise SettingsError(
                f"{', '.join(map(str, files))}: these are the books of different runs: {sorted(names)}"
            )
        self.name = names.pop() if names else secrets.token_hex(16)
        entries = dict.fromkeys([*(entry for _, own in found for entry in own), *map(_entry, lines)])
        self.lines = [entry._asdict() for entry in entries]
        self._known = {entry.release for entry in entries}
        self._cohorts: dict[tuple[int, int], int] = {}  # vectors, by the round of the draw and the cohort's size
        self._clients: Counter[int] = Counter()
        for entry in entries:
            self._count(entry)
        self._files = tuple(files)
        for file in files:
            _write(file, [{"run": self.name}, *self.lines])

    def book(self, entry: Entry) -> None:
        """Book a release, before it is used. A repetition is booked only once."""
        if entry.release in self._known:
            return
        line = entry._asdict()
        for file in self._files:
            _append(file, line)
        self._known.add(entry.release)
        self.lines.append(line)
        self._count(entry)

    def _count(self, entry: Entry) -> None:
        key = entry.drawn, entry.cohort
        self._cohorts[key] = self._cohorts.get(key, 0) + entry.vectors
        self._clients.update(dict.fromkeys(entry.clients, entry.vectors))

    @property
    def cohorts(self) -> Counter[Release]:
        """How many cohorts had this size, and uploaded this number of vectors."""
        return Counter(CohortUploads(size, vectors) for (_, size), vectors in self._cohorts.items())

    @property
    def clients(self) -> Counter[Release]:
        """The number of vectors that each client uploaded."""
        return Counter({ClientUploads(client): count for client, count in self._clients.items()})


def name_in_books(files: Iterable[Path]) -> str | None:
    """The name of the run that these files belong to, or None if none of them exists."""
    return next((_read(file)[0] for file in files if file.exists()), None)


def _read(file: Path) -> tuple[str, list[Entry]]:
    """The name of the run and its entries, without a last line that is only half written."""
    try:
        head, *lines = [json.loads(line) for line in file.read_text().split("\n")[:-1]]
        name = head["run"]
        if not isinstance(name, str) or not name.isalnum() or len(name) > NAME:
            raise ValueError("the name of the run is not valid")
        return name, [_entry(line) for line in lines]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{file} is damaged ({type(error).__name__}: {error}): it counts what was released; restore it"
        ) from None


def _entry(line: Any) -> Entry:
    drawn, cohort, clients, vectors, release = (line[name] for name in Entry._fields)
    numbers = [drawn, cohort, vectors, *clients]
    if not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(release, str):
        raise ValueError(f"a line is {str(line)[:80]}")
    return Entry(drawn, cohort, tuple(clients), vectors, release)


def _write(file: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Make the file, or bring it up to date, in a way that never shows half of it."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        text = "".join(json.dumps(line) + "\n" for line in lines)
        write_whole(file, text.encode(), file.with_name(f".{file.name}.tmp"))
    except OSError as error:
        raise StorageError(
            f"{file} could not be written: {error.strerror}; a private run needs its books"
        ) from None


def _append(file: Path, line: dict[str, Any]) -> None:
    try:
        with file.open("a") as stream:
            stream.write(json.dumps(line) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
    except OSError as error:
        raise StorageError(
            f"{file} could not be written: {error.strerror}; nothing was released; fix this and --resume"
        ) from None
