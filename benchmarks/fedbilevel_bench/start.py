"""python -m fedbilevel_bench.start: seconds from the start of a process to the end of its first outer iteration.

The paper's MNIST set-up; imports, data, compilation and the evaluation before the first iteration are included.
Cold has an empty cache of compiled programs, warm the one that the cold start filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(programs: Path, out: Path) -> float:
    """One outer iteration of the paper's preset in a fresh process, with this cache of programs."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    code = "from fedbilevel.cli import main; main()"
    settings = ["--set", "stop.iterations=1", "--set", "stop.rounds=none", "--quiet", "--out", str(out)]
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code, "run", "paper", *settings], env=environment, check=True)
    return time.perf_counter() - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("cold", "warm", "warm again"):
            print(f"{name}: {seconds(place / 'programs', place / name):.1f} s")


if __name__ == "__main__":
    main()
