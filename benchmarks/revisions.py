"""Outer iterations of an older revision beside those of this one, in turn, in one run.

    python benchmarks/revisions.py REVISION [--case mnist-mlp-iid-tau1-N10 ...] [--repeats 15]

The cases are those of `fedbilevel bench`. The older revision is checked out into a temporary folder. Each
revision has a process of its own, which compiles the case first, and then does an iteration whenever it is asked.
While one of them works, the other one waits, so other work on the machine slows both alike. It prints the ratio of
the medians and its quartiles over pairs of iterations, by the clock and in processor time. Dependencies are those
of this environment.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np

HERE = Path(__file__).resolve().parents[1]
WARM = 3  # iterations before any is timed


def work(name: str) -> None:
    """Do an iteration of a case for every line of the standard input, and answer with its seconds."""
    from fedbilevel.runtime import prepare_runtime

    room = (
        "fedbilevel.bench" if find_spec("fedbilevel.bench") else "fedbilevel_bench"
    )  # before it was in the package
    cases, ours = (import_module(f"{room}.{module}") for module in ("cases", "ours"))
    prepare_runtime()
    iteration = ours.ours(cases.CASES[name])
    for _ in range(WARM * (cases.CASES[name].N + 1)):  # its programs depend on Q, which is drawn anew
        iteration()
    print("ready", flush=True)
    for _ in sys.stdin:
        clock, processor = time.perf_counter(), time.process_time()
        iteration()
        print(json.dumps([time.perf_counter() - clock, time.process_time() - processor]), flush=True)


@contextmanager
def revision(name: str) -> Iterator[Path]:
    """A folder with the sources of a revision. Its benchmarks are in the folder beside it."""
    with tempfile.TemporaryDirectory() as folder:
        asked = ["git", "-C", str(HERE), "archive", name, "src", "benchmarks"]
        archive = subprocess.run(asked, check=True, capture_output=True)
        subprocess.run(["tar", "-x", "-C", folder], check=True, input=archive.stdout)
        yield Path(folder) / "src"


@contextmanager
def worker(source: Path, case: str) -> Iterator[subprocess.Popen[str]]:
    """A process that does iterations of a case with these sources."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--work", case],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": f"{source}{os.pathsep}{source.parent / 'benchmarks'}"},
    )
    try:
        yield process
    finally:
        process.terminate()
        process.communicate()


def answer(process: subprocess.Popen[str], question: str | None = None) -> str:
    """Ask a process, if there is a question, and read its next line."""
    assert process.stdin is not None and process.stdout is not None
    if question is not None:
        process.stdin.write(question)
        process.stdin.flush()
    line = process.stdout.readline()
    if not line:
        raise SystemExit("a process ended; its complaint is above")
    return line


def compared(old: Path, case: str, repeats: int) -> np.ndarray:
    """Seconds by repeat, revision (old, new) and kind (clock, processor)."""
    with worker(old, case) as first, worker(HERE / "src", case) as second:
        for process in (first, second):
            answer(process)
        return np.array([[json.loads(answer(p, "go\n")) for p in (first, second)] for _ in range(repeats)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("revision", nargs="?")
    parser.add_argument("--case", action="append", default=[])
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work)
        return
    if not given.revision:
        parser.error("name a revision, such as HEAD~10")
    print("| case | new / old, by the clock | new / old, in processor time | new, ms by the clock |")
    print("|---|---|---|---|")
    with revision(given.revision) as old:
        for case in given.case or ["mnist-mlp-iid-tau5"]:
            seconds = compared(old, case, given.repeats)
            cells = []
            for kind in range(2):
                before, after = seconds[:, 0, kind], seconds[:, 1, kind]
                low, high = np.quantile(after / before, [0.25, 0.75])
                cells.append(f"{np.median(after) / np.median(before):.2f} ({low:.2f} to {high:.2f})")
            print(f"| {case} | {' | '.join(cells)} | {1000 * np.median(seconds[:, 1, 0]):.0f} |", flush=True)


if __name__ == "__main__":
    main()
