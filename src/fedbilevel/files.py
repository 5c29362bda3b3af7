"""Files that survive a crash: written whole or not at all, and recognised by a digest of their arrays.

Folders for results are here too: they are refused before any work is done whose results they could not hold.
"""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from .errors import RunFolderError, StorageError


def write_whole(path: Path, content: bytes, temporary: Path) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees the old file or the new one.

    Raises `OSError`, and leaves no temporary file behind.
    """
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        rename(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # half a file is of no use, and takes up space
        raise


def rename(old: Path, new: Path) -> None:
    """Give a file another name in its folder, in place of the file that has it, and have that written down."""
    old.replace(new)
    sync_folder(new.parent)


def make_folder(path: Path) -> None:
    """Make a folder, and the folders above it that are missing. Each is written down in the one above it."""
    missing = [place for place in (path, *path.parents) if not place.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for place in reversed(missing):
        sync_folder(place.parent)


def check_place(path: Path, option: str) -> None:
    """Raise if no folder can be made in the place that an option names. Nothing is made."""
    with _naming(path, option):
        for place in (path, *path.parents):
            with suppress(FileNotFoundError):
                if not stat.S_ISDIR(place.stat().st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, "it is a file" if place == path else "Not a directory")
                return


def results_folder(path: Path, option: str) -> None:
    """Make the folder that an option names, for results, or raise an error with a remedy."""
    check_place(path, option)
    with _naming(path, option):
        make_folder(path)


@contextmanager
def storing(path: Path) -> Iterator[None]:
    """Turn a failure to write results to a folder into an error with a remedy."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise StorageError(
            f"{where} could not be written: {error.strerror}; make room and repeat the command"
        ) from None


@contextmanager
def _naming(path: Path, option: str) -> Iterator[None]:
    """Turn an `OSError` into an error that names the option and its value."""
    try:
        yield
    except OSError as error:
        raise RunFolderError(
            f"{option} {path} cannot be written: {error.strerror}; name a folder that can be"
        ) from None


def sync_folder(folder: Path) -> None:
    """Have the system write down the names in a folder: without it a rename may be lost with the power."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems cannot sync a folder
            raise
    finally:
        os.close(descriptor)


def arrays_digest(arrays: Mapping[str, np.ndarray], head: str = "") -> str:
    """The SHA-256 of a head and of arrays with their names, types and shapes."""
    made = hashlib.sha256(head.encode())
    for name, array in sorted(arrays.items()):
        made.update(f"{name} {array.dtype} {array.shape}\n".encode() + array.tobytes())
    return made.hexdigest()
