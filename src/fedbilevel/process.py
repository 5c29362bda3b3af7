"""What a process that computes sets before it starts. The command line and the benchmarks do; a script may."""

from __future__ import annotations

import ctypes
import os

import jax
from platformdirs import user_cache_path

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # the numbers of glibc's malloc.h


def prepare_process() -> None:
    """Keep freed memory, and compiled programs from one start to the next."""
    keep_memory()
    cache_programs()


def keep_memory() -> None:
    """Let the C library keep freed memory for the next call instead of giving it back to the system.

    glibc returns every block above 32 MiB at once, so each call of a program pays anew for the faults of all
    the pages it touches: 33 of 35 ms for the patches of one client's first convolution. Elsewhere than on
    glibc nothing happens.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if os.name == "posix" else None
    if mallopt is not None:
        mallopt(_MMAP_MAX, 0)
        mallopt(_TRIM_THRESHOLD, 2**31 - 1)


def cache_programs() -> None:
    """Keep compiled programs in the user's cache folder, unless JAX was told of another one."""
    if jax.config.values["jax_compilation_cache_dir"] is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache_path("fedbilevel") / "programs"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.05)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
