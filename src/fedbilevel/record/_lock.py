"""The lock of a run folder: the process of a run has it, and others can see whether one does."""

from __future__ import annotations

import fcntl
import time

READERS = 0.25  # seconds for which a run waits for readers, who have the lock only for a moment


def take_lock(file: int) -> bool:
    """Lock an open file for this process; False if another run has it."""
    limit = time.monotonic() + READERS
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > limit:
                return False
            time.sleep(READERS / 20)
        else:
            return True


def is_locked(file: int) -> bool:
    """Whether another process has locked an open file, as the process of a run does. The lock is given back."""
    try:
        # Shared, so that two readers do not take each other for a run.
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        fcntl.flock(file, fcntl.LOCK_UN)
    except BlockingIOError:
        return True
    except OSError:
        return False  # the file system has no locks
    return False
