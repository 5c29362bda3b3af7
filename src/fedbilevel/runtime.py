"""Settings of the process that make runs faster, which the command line and the benchmarks use, and its memory."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

import jax
from platformdirs import user_cache_path

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the numbers of glibc's malloc.h


def prepare_runtime() -> None:
    """Use two devices, keep freed memory, and keep compiled programs from one start to the next."""
    two_devices()
    keep_memory()
    cache_programs()


def two_devices() -> None:
    """Let JAX see a CPU with several cores as two devices, unless the number of devices is set already.

    Each device then serves half of the clients: one half computes while the other waits for a sequential part.
    Matrix products use all cores either way.
    """
    told = "JAX_NUM_CPU_DEVICES" in os.environ or "device_count" in os.environ.get("XLA_FLAGS", "")
    if not told and (os.cpu_count() or 1) > 1:
        with suppress(RuntimeError):  # JAX has started already
            jax.config.update("jax_num_cpu_devices", 2)


def keep_memory() -> None:
    """Let the C library keep freed memory for the next call instead of giving it back to the system.

    glibc returns every block above 32 MiB at once, so each call of a program pays again for the faults of all the
    pages that it touches: 33 of 35 ms for the patches of one client's first convolution. Without glibc this does
    nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def cache_programs() -> None:
    """Keep compiled programs in the user's cache folder, unless another folder is set for JAX."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache_path("fedbilevel") / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def forget_programs() -> None:
    """Let JAX forget the programs of this process, and with them the data that they were made for.

    Every run has programs of its own, so a process that does many runs would otherwise hold the data of all of
    them.
    """
    jax.clear_caches()
    gc.collect()


def peak_memory() -> int:
    """The most memory that this process had, in megabytes, since its start or the last `forget_peak`.

    On Linux `getrusage` would say at least what the process had that started this one.
    """
    with suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return round(int(line.split()[1]) / 2**10)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10))


def forget_peak() -> None:
    """Let `peak_memory` begin anew, where the system can do that, which is Linux."""
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
