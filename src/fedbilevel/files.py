"""Files that survive a crash: written whole or not at all, and recognised by a digest of their arrays."""

from __future__ import annotations

import errno
import hashlib
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import numpy as np


def write_whole(path: Path, content: bytes, temporary: Path) -> None:
    """Write a file under a temporary name and rename it, so that a reader sees the old file or the new one.

    Raises `OSError`, and leaves no temporary file behind.
    """
    try:
        with temporary.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(path)
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)  # half a file is of no use, and takes up space
        raise


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
