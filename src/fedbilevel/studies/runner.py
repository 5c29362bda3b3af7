"""Running many specs: finished runs are not run again, and interrupted runs are continued.

A few processes do the runs, one after another, and stay for those that a search or a comparison asks for later. A
run that ends its process affects no other run: the next one gets a new process. So does the one after a run that
took much memory. A run is in the folder named by its digest, and a longer run also serves specs that need only its
first part.
"""

from __future__ import annotations

import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..errors import FedBilevelError, SettingsError
from ..files import results_folder
from ..record import RunFolder, summarise
from ..spec import Spec

EVERY = 60.0  # seconds between two lines of progress in a log
LOOK = 5.0  # seconds between two looks at the histories of all runs, which have to be read for it
MUCH = 2000  # megabytes of memory, after which the next run gets a new process


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


class Workers:
    """The processes that do runs, `jobs` at a time. They start with their first run and end with the block."""

    def __init__(self, runs: Runs, jobs: int) -> None:
        self._runs, self._jobs = runs, jobs
        self._stack = ExitStack()
        self.all: list[_Worker] = []

    def __enter__(self) -> Workers:
        for cores in _shares_of_cores(self._jobs):
            complaints = self._stack.enter_context(tempfile.TemporaryFile("w+"))
            worker = _Worker(self._runs, complaints, cores, alone=self._jobs > 1)
            self.all.append(self._stack.enter_context(closing(worker)))
        return self

    def __exit__(self, *error: Any) -> None:
        self.all.clear()
        self._stack.close()


def run_all(
    specs: Sequence[Spec], runs: Runs, *, jobs: int, console: Console, workers: Workers | None = None
) -> None:
    """Run every spec that is not finished, `jobs` at a time, with progress and the time left.

    Without workers it makes its own, which end with these runs.
    """
    waiting = [s for s in longest_of_each(specs) if runs.share(s) < 1.0]
    if not waiting:
        return
    results_folder(runs.folder, "--runs")
    with ExitStack() as stack:
        own = stack.enter_context(Workers(runs, jobs)) if workers is None else workers
        _run_by(own.all, waiting, runs, console)


def _run_by(workers: Sequence[_Worker], waiting: Sequence[Spec], runs: Runs, console: Console) -> None:
    """Let the workers do the runs."""
    todo, failed = list(waiting), list[str]()
    with _progress(console) as progress:
        task = progress.add_task("runs", total=len(waiting), left="")
        start, before = time.monotonic(), sum(map(runs.share, waiting))
        told = looked = start
        while todo or any(worker.spec for worker in workers):
            for worker in workers:
                if worker.spec is None and todo:
                    worker.begin(todo.pop(0))
            for worker in _answering(workers, LOOK):
                spec, complaint = worker.end()
                if complaint is not None and runs.failure(spec) is None:
                    failed.append(f"{runs.of(spec).path}: {complaint[-300:]}")
            now = time.monotonic()
            if now - looked < LOOK:
                continue
            done, looked = sum(map(runs.share, waiting)), now
            left = (now - start) / max(done - before, 1e-6) * (len(waiting) - done)
            told_left = clock(left) if done > before else "?"
            progress.update(task, completed=done, left=told_left)
            if not console.is_terminal and now - told >= EVERY:  # a log has no bar
                console.print(f"{done:.1f} of {len(waiting)} runs, left {told_left}")
                told = now
    if failed:
        raise FedBilevelError(f"{len(failed)} of {len(waiting)} runs failed; first: {failed[0]}")


def longest_of_each(specs: Sequence[Spec]) -> list[Spec]:
    """The longest spec of each group of specs that differ only in their budget, because it serves them all."""
    longest: dict[str, Spec] = {}
    for spec in specs:
        known = longest.get(spec.digest)
        if known is None or (spec.stop.rounds or 0) > (known.stop.rounds or 0):
            longest[spec.digest] = spec
    return list(longest.values())


def _shares_of_cores(jobs: int) -> list[frozenset[int]]:
    """The cores of each of several processes; an empty set is for a process that may use any.

    On a core of its own a run needs about a fifth less processor time than with a thread on every core.
    """
    if not hasattr(os, "sched_getaffinity"):  # only Linux has it
        return [frozenset()] * jobs
    cores = sorted(os.sched_getaffinity(0))
    return [frozenset(cores[i::jobs]) for i in range(jobs)]


class _Worker:
    """A process that does one run after another (see `worker.py`), and the spec that it is at."""

    def __init__(self, runs: Runs, complaints: IO[str], cores: frozenset[int], alone: bool) -> None:
        self.spec: Spec | None = None
        self._runs, self._complaints = runs, complaints  # a pipe that nobody reads would fill up
        self._cores = cores
        self._environment = {"JAX_NUM_CPU_DEVICES": "1"} if alone else {}  # runs side by side fill the cores
        self._process: subprocess.Popen[str] | None = None

    def begin(self, spec: Spec) -> None:
        """Give the process a run, and start the process if there is none."""
        file = self._runs.folder / f"{spec.digest}.toml"
        file.write_text(spec.to_toml())
        if self._process is None:
            self._complaints.seek(0)
            self._complaints.truncate()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "fedbilevel.studies.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._complaints,
                text=True,
                env=self._environment | os.environ,
            )
            if self._cores:  # JAX starts its threads later, and they inherit this
                os.sched_setaffinity(self._process.pid, self._cores)
        self.spec = spec
        with suppress(BrokenPipeError):  # it has died, which the missing answer tells
            _pipe(self._process.stdin).write(json.dumps([str(file), str(self._runs.of(spec).path)]) + "\n")
            _pipe(self._process.stdin).flush()

    @property
    def answers(self) -> IO[str]:
        """The pipe that has an answer, or ends, when the run has ended."""
        assert self._process is not None
        return _pipe(self._process.stdout)

    def end(self) -> tuple[Spec, str | None]:
        """The spec whose run has ended, and why it failed, or None."""
        assert self.spec is not None
        spec, self.spec, line = self.spec, None, self.answers.readline()
        if line:
            answer = json.loads(line)
            if answer["megabytes"] > MUCH:
                self.close()
            return spec, answer["complaint"]
        self.close()
        self._complaints.seek(0)
        return spec, self._complaints.read().strip() or "its process was killed"

    def close(self) -> None:
        """End the process. A run that it is at can be continued."""
        if self._process is not None:
            self._process.terminate()
            with suppress(BrokenPipeError):
                self._process.communicate()
            self._process = None


def _pipe(stream: IO[str] | None) -> IO[str]:
    assert stream is not None, "the process was started with pipes"
    return stream


def _answering(workers: Sequence[_Worker], seconds: float) -> list[_Worker]:
    """The workers whose runs have ended; after this many seconds, none."""
    with selectors.DefaultSelector() as selector:
        for worker in workers:
            if worker.spec is not None:
                selector.register(worker.answers, selectors.EVENT_READ, worker)
        return [key.data for key, _ in selector.select(seconds)]


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


def clock(seconds: float) -> str:
    """Seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02d}:{rest:02d}"


class Clock:
    """Tells what is done of several things, and about how long the rest takes."""

    def __init__(self, total: int, console: Console) -> None:
        self._total, self._console, self._done = total, console, list[float]()

    def tell(self, what: str, seconds: float) -> None:
        """Say that one more is done. Those that took no time were done before, and say nothing about the rest."""
        self._done.append(seconds)
        worked = [each for each in self._done if each > 1.0] or self._done
        left = (self._total - len(self._done)) * sum(worked) / len(worked)
        self._console.print(
            f"{len(self._done)} of {self._total}: {what}; {seconds:.0f} s, left about {clock(left)}",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
