"""`python -m fedbilevel.bench.start` times a process from its start to the end of its first outer iteration.

It runs the paper's MNIST set-up. The time includes imports, data, compilation and the evaluation before the first
iteration. The cold start has an empty cache of compiled programs, and the warm starts use the cache that the cold
start filled.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CODE = """
import sys, time
from fedbilevel.runtime import prepare_runtime
prepare_runtime()
from fedbilevel import load_spec, run
spec = load_spec("paper", {"stop.iterations": 1, "stop.rounds": None})
run(spec, sys.argv[1], observers=[lambda progress: print(time.time())])
"""


def seconds(programs: Path, out: Path) -> float:
    """Time one outer iteration of the paper's preset in a new process, with this cache of compiled programs."""
    environment = os.environ | {
        "JAX_COMPILATION_CACHE_DIR": str(programs),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.05",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }
    start = time.time()
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(out)], env=environment, check=True, stdout=subprocess.PIPE, text=True
    )
    return float(done.stdout) - start


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        for name in ("cold", "warm", "warm again"):
            print(f"{name}: {seconds(place / 'programs', place / name):.1f} s")


if __name__ == "__main__":
    main()
