"""Compiles the library's files of C where there is a compiler. Without one, NumPy and XLA do their work.

An installation from source, by pip or uv, runs this. Set FEDBILEVEL_PURE=1 for a wheel that any machine can use.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = Path("src", "fedbilevel", "native")
OPTIONS = ["-O3", "-std=gnu11", "-fPIC", "-shared"]


class Compiled(BuildHookInterface):
    """Adds the compiled file to a wheel, which is then for machines of this kind."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if self.target_name != "wheel" or os.environ.get("FEDBILEVEL_PURE"):
            return
        for source in sorted(Path(self.root, NATIVE).glob("*.c")):
            made = source.with_suffix(".so")
            if why := compile_file(source, made):
                made.unlink(missing_ok=True)  # of an earlier installation
                self.app.display_warning(f"{source.name} was not compiled, so its work will take longer: {why}")
                continue
            build_data["artifacts"].append(f"/{made.relative_to(self.root).as_posix()}")
            build_data["pure_python"] = False
            build_data["tag"] = f"py3-none-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"


def headers() -> list[str]:
    """Where the headers of XLA are, which come with jaxlib, and their version; nothing if it is not there."""
    try:
        import jax
        import jaxlib
    except ImportError:
        return []
    return ["-I", jax.ffi.include_dir(), f'-DJAXLIB="{jaxlib.__version__}"']


def compile_file(source: Path, made: Path) -> str:
    """Compile a file of C into a shared library; return why that failed, and nothing if it did not."""
    if '#include "xla/' in source.read_text() and not headers():
        return "the environment that builds has no jax, whose headers are needed: pip install --no-build-isolation"
    compiler = shlex.split(os.environ.get("CC") or "cc")
    fresh = made.with_name(f"{made.name}.{os.getpid()}")  # a process that has loaded the old file keeps it
    try:
        done = subprocess.run(
            [*compiler, *OPTIONS, *headers(), str(source), "-lm", "-o", str(fresh)], capture_output=True, text=True
        )
    except OSError as error:
        return str(error)
    if done.returncode != 0:
        fresh.unlink(missing_ok=True)
        return done.stderr.strip() or f"{compiler[0]} ended with {done.returncode}"
    fresh.replace(made)
    return ""
