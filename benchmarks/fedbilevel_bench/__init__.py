"""Benchmarks of fedbilevel: one outer iteration beside its floor and beside PyTorch, in one run.

`fedbilevel bench` is the command. Every case is measured in a process of its own, so that its memory is its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from .cases import CASES, STANDARD, Case
from .report import profile_table, ratio_table, write

__all__ = ["CASES", "STANDARD", "Case", "bench", "profile_table", "ratio_table"]


def bench(
    names: Sequence[str], out: Path | None, budget: float, say: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure cases one after the other; `say` is told of each when it is done, and what there is is written."""
    rows: list[dict[str, Any]] = []
    for name in names:
        command = [sys.executable, "-m", "fedbilevel_bench", name, str(budget)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        say(rows[-1])
        if out is not None:
            write(rows, out)
    return rows
