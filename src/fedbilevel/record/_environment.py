"""The environment of a run: versions, machine, command and git revision."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

PACKAGES = ("fedbilevel", "jax", "jaxlib", "numpy", "equinox", "optax")


def environment() -> dict[str, Any]:
    """The facts about the environment of a run that a reader needs to know."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "revision": _revision(),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "packages": {name: metadata.version(name) for name in PACKAGES},
    }


def _revision() -> str | None:
    """The git revision of the library's checkout, or None when it does not run from one."""
    try:
        done = subprocess.run(
            ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
