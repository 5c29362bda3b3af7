"""Running many specs: finished runs are not run again, and interrupted runs are continued.

Every run has its own process, so a crash affects only one run and memory is given back. A run is in the folder
named by its digest, and a longer run also serves specs that need only its first part.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import FedBilevelError, SettingsError
from ..files import results_folder
from ..record import RunFolder, summarise
from ..spec import Spec

EVERY = 60.0  # seconds between two lines of progress in a log
LOOK = 5.0  # seconds between two looks at the histories of all runs, which have to be read for it


@dataclass(frozen=True)
class Runs:
    """The folder of runs by digest."""

    folder: Path

    def of(self, spec: Spec) -> RunFolder:
        return RunFolder(self.folder / spec.digest)

    def share(self, spec: Spec) -> float:
        """The share of a spec's budget that its folder already holds; 1.0 if its summary says it is finished."""
        history = self.of(spec).history()
        if not history:
            return 0.0
        last, stop = history[-1], spec.stop
        parts = [(last["rounds"], stop.rounds), (last["iteration"], stop.iterations)]
        shares = [min(1.0, used / limit) for used, limit in parts if limit]
        cost = last["rounds"] / max(last["iteration"], 1)
        enough = stop.rounds is not None and last["rounds"] + cost > stop.rounds
        ended = self.of(spec).file("summary.json").exists()
        finished = ended and (enough or 1.0 in shares or self.failure(spec) is not None)
        return 1.0 if finished else min(max(shares, default=0.0), 0.999)

    def failure(self, spec: Spec) -> str | None:
        """The reason why a run diverged, or None. A run that diverged would do so again."""
        folder = self.of(spec)
        if not folder.file("summary.json").exists():
            return None
        reason = folder.summary().get("failure")
        return None if reason is None else str(reason)

    def history(self, spec: Spec) -> list[dict[str, Any]]:
        """The history of a finished spec, cut to its budget: the folder may hold a longer run."""
        stop = spec.stop
        return [
            r
            for r in self.of(spec).history()
            if (stop.rounds is None or r["rounds"] <= stop.rounds)
            and (stop.iterations is None or r["iteration"] <= stop.iterations)
        ]

    def summary(self, spec: Spec, metric: str = "test_accuracy") -> dict[str, Any]:
        """The summary of a finished spec by one of its accuracies, from the history up to its budget."""
        history = self.history(spec)
        books: dict[str, Any] = {"steps": {}, "probes": {}, "rejected": {}}
        if all(r.get(metric) is None for r in history):
            raise SettingsError(f"{self.of(spec).path} has no {metric}; choose a problem that measures it")
        window = spec.evaluate.window
        return summarise(history, books, window=window, metric=metric, seconds=history[-1]["seconds"])


def run_all(specs: Sequence[Spec], runs: Runs, *, jobs: int, console: Console) -> None:
    """Run every spec that is not finished, `jobs` at a time, with progress and the time left."""
    waiting = [s for s in _longest_of_each(specs) if runs.share(s) < 1.0]
    if not waiting:
        return
    results_folder(runs.folder, "--runs")
    todo, running, failed = list(waiting), dict[str, tuple[Spec, subprocess.Popen[str]]](), list[str]()
    with _progress(console) as progress:
        task = progress.add_task("runs", total=len(waiting), left="")
        start, before = time.monotonic(), sum(map(runs.share, waiting))
        told = looked = start
        try:
            while todo or running:
                while todo and len(running) < jobs:
                    spec = todo.pop(0)
                    running[spec.digest] = spec, _start(spec, runs, jobs)
                time.sleep(0.5)
                for digest, (spec, process) in list(running.items()):
                    if process.poll() is None:
                        continue
                    del running[digest]
                    _, complaint = process.communicate()
                    if process.returncode and runs.failure(spec) is None:
                        failed.append(f"{runs.of(spec).path}: {complaint.strip()[-300:]}")
                now = time.monotonic()
                if now - looked < LOOK:
                    continue
                done, looked = sum(map(runs.share, waiting)), now
                left = (now - start) / max(done - before, 1e-6) * (len(waiting) - done)
                clock = _clock(left) if done > before else "?"
                progress.update(task, completed=done, left=clock)
                if not console.is_terminal and now - told >= EVERY:  # a log has no bar
                    console.print(f"{done:.1f} of {len(waiting)} runs, left {clock}")
                    told = now
        finally:
            for _, process in running.values():
                process.terminate()
                process.communicate()
    if failed:
        raise FedBilevelError(f"{len(failed)} of {len(waiting)} runs failed; first: {failed[0]}")


def _longest_of_each(specs: Sequence[Spec]) -> list[Spec]:
    """The longest spec of each group of specs that differ only in their budget, because it serves them all."""
    longest: dict[str, Spec] = {}
    for spec in specs:
        known = longest.get(spec.digest)
        if known is None or (spec.stop.rounds or 0) > (known.stop.rounds or 0):
            longest[spec.digest] = spec
    return list(longest.values())


def _start(spec: Spec, runs: Runs, jobs: int) -> subprocess.Popen[str]:
    file = runs.folder / f"{spec.digest}.toml"
    file.write_text(spec.to_toml())
    code = "from fedbilevel.cli import main; main()"
    command = [
        sys.executable,
        "-c",
        code,
        "run",
        str(file),
        "--out",
        str(runs.of(spec).path),
        "--resume",
        "--quiet",
    ]
    alone = {"JAX_NUM_CPU_DEVICES": "1"} if jobs > 1 else {}  # runs side by side fill the cores
    return subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=alone | os.environ
    )


@contextmanager
def _progress(console: Console) -> Iterator[Progress]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left {task.fields[left]}"),
        console=console,
        transient=True,
    ) as progress:
        yield progress


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"
