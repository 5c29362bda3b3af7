"""A site's audit file: JSON lines, each with the SHA-256 of the line before it.

The first linked line is `begin`; its digest is of everything before it, which is nothing, or lines of a time when
lines were not linked. If a crash left half a line at the end, that half stays, and a line `torn` after it has its
digest and that of the last whole line. So a line that is changed, removed or added in the middle shows. Lines that
are removed at the end do not show in the file alone, nor does a file that was written anew as a whole. Whoever
notes the digest of a line elsewhere can see both.
"""

from __future__ import annotations

import fcntl
import json
import os
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from ...errors import SettingsError

TEXT, ITEMS = 300, 50  # the longest text and the most items of a line; what is longer is cut off
BLOCK = 2**16


class Audit:
    """Appends lines to an audit file. Several processes may write to one file."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._end: tuple[int, int, str] | None = (
            None  # after our last line: the file, its size and the line's digest
        )

    def write(self, **entry: Any) -> None:
        """Append a line with the time and this process, or raise `OSError`."""
        with self._file.open("a+b") as stream:
            fcntl.flock(stream, fcntl.LOCK_EX)  # until the file is closed
            size, number = stream.seek(0, os.SEEK_END), os.fstat(stream.fileno()).st_ino
            if self._end is not None and self._end[:2] == (number, size):
                joint, before = b"", self._end[2]
            else:
                joint, before = _joint(stream, size)
            line = _line(_short(entry), before)
            written = joint + line + b"\n"
            stream.write(written)
            self._end = number, size + len(written), _digest(line)


def _joint(stream: BinaryIO, size: int) -> tuple[bytes, str]:
    """What must be written before the next line so that it is linked to the file, and the digest for its link."""
    whole, half = _tail(stream, size)
    if whole is None or _link(whole) is None:
        stream.seek(0)
        content = stream.read(size)
        made = _line({"what": "begin"}, _digest(content + (b"\n" if half else b"")))
    elif half:
        made = _line({"what": "torn", "whole": _digest(whole)}, _digest(half))
    else:
        return b"", _digest(whole)
    return (b"\n" if half else b"") + made + b"\n", _digest(made)


def _tail(stream: BinaryIO, size: int) -> tuple[bytes | None, bytes]:
    """The last whole line of a file, if it has one, and what stands after it."""
    tail, start = b"", size
    while start > 0 and tail.count(b"\n") < 2:
        start = max(0, start - BLOCK)
        stream.seek(start)
        tail = stream.read(size - start)
    *lines, half = tail.split(b"\n")
    return (lines[-1] if lines else None), half


def _line(entry: dict[str, Any], before: str) -> bytes:
    return json.dumps({"time": time.time(), "pid": os.getpid(), **entry, "before": before}).encode()


def _short(value: Any) -> Any:
    """The value without what is too long for a line, since the server chooses what is written."""
    if isinstance(value, dict):
        return {str(key)[:TEXT]: _short(value[key]) for key in list(value)[:ITEMS]}
    if isinstance(value, list | tuple):
        return [_short(item) for item in value[:ITEMS]]
    return value[:TEXT] if isinstance(value, str) else value


def _digest(data: bytes) -> str:
    return sha256(data).hexdigest()


def _link(line: bytes) -> dict[str, Any] | None:
    """The entry of a linked line; None if this is no such line."""
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("before"), str) else None


@dataclass(frozen=True)
class Verdict:
    """What an audit file shows.

    digests   the digests of all whole lines, in their order
    unlinked  the number of lines at the beginning that are from before the chain; `begin` has their digest
    broken    the place where the chain is broken, or None
    torn      whether the file ends in half a line
    """

    digests: tuple[str, ...]
    unlinked: int
    broken: str | None
    torn: bool

    @property
    def lines(self) -> int:
        """The number of whole lines."""
        return len(self.digests)

    @property
    def last(self) -> str:
        """The digest of the last whole line."""
        return self.digests[-1] if self.digests else ""


def verify_audit(file: Path) -> Verdict:
    """Check the chain of an audit file."""
    try:
        content = file.read_bytes()
    except OSError as error:
        raise SettingsError(f"the audit file {file} cannot be read: {error.strerror}") from None
    *lines, half = content.split(b"\n")
    linked = (n for n, line in enumerate(lines) if _link(line) is not None)
    first = next(linked, len(lines))
    return Verdict(tuple(map(_digest, lines)), first, _broken(content, lines, first), bool(half))


def _broken(content: bytes, lines: list[bytes], first: int) -> str | None:
    """Where the chain that begins with the line `first` is broken; lines are counted from one for a reader."""
    if first == len(lines):
        return None
    begin = _link(lines[first])
    head = content[: sum(len(line) + 1 for line in lines[:first])]
    if begin is None or begin.get("what") != "begin" or begin["before"] != _digest(head):
        return (
            f"line {first + 1} does not begin the chain of the file: what stood before it was changed or removed"
        )
    for number in range(first + 1, len(lines)):
        entry, before = _link(lines[number]), lines[number - 1]
        after = _link(lines[number + 1]) if number + 1 < len(lines) else None
        if entry is None:
            torn = after is not None and after.get("what") == "torn" and after.get("whole") == _digest(before)
            if not torn:
                return f"line {number + 1} is not linked: it was added or changed"
        elif entry.get("what") == "begin" or entry["before"] != _digest(before):
            return f"line {number + 1} does not follow from the line before: a line was changed, removed or added"
    return None
