"""The benchmark: one outer iteration, its floor and its PyTorch rivals, measured in the same run.

The command is `fedbilevel bench`. Every case is measured in a new process, so that the peak memory of one case
does not include that of another.

PyTorch is optional. `measure` imports the rivals only if torch is installed, and nothing else here imports them.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from ..files import results_folder
from .cases import CASES, STANDARD, Case
from .report import profile_table, ratio_table, write

__all__ = ["CASES", "STANDARD", "Case", "bench", "profile_table", "ratio_table"]


def bench(
    names: Sequence[str], out: Path | None, budget: float, say: Callable[[dict[str, Any]], None]
) -> list[dict[str, Any]]:
    """Measure cases one after the other and return their rows.

    After each case, `say` is called with its row, and all rows so far are written to `out` if that is given.
    """
    if out is not None:
        results_folder(out, "--out")
    rows: list[dict[str, Any]] = []
    for name in names:
        command = [sys.executable, "-m", "fedbilevel.bench", name, str(budget)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
        rows.append(json.loads(done.stdout.splitlines()[-1]))
        say(rows[-1])
        if out is not None:
            write(rows, out)
    return rows
