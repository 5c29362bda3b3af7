"""Kill a run at random moments, resume it each time, and compare its history with an uninterrupted one.

    python benchmarks/kill_and_resume.py --times 100

Half of the kills are anywhere within the run, half within a write of a checkpoint: the process that runs sends
itself SIGKILL from a timer, or at a random call of the functions that write. A resumed run must go on from what it
finds; a folder that cannot be resumed is corrupt.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from fedbilevel import Progress, load_spec, run
from fedbilevel.spec import Spec

SETTINGS: dict[str, Any] = {
    "data.name": "digits",
    "data.clients": 20,
    "problem.hidden": 16,
    "stop.rounds": None,
    "evaluate.checkpoint_every": 1,
}
WRITES = ("fsync", "replace", "link", "rename")  # of os: what a checkpoint is written with


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def child(spec: Spec, folder: Path, seed: int, iterations: int) -> None:
    """Resume the run and die in it: at once after some iterations, a little later, or in a write."""
    draw = random.Random(seed)
    after, kind = draw.randint(1, iterations), draw.choice(("moment", "write"))
    seen = [0]

    def watch(progress: Progress) -> None:
        seen[0] += 1
        if seen[0] != after:
            return
        if kind == "moment":
            threading.Timer(draw.uniform(0, 0.05), die).start()
        else:
            interrupt_writes(draw.randint(1, 12), draw.random() < 0.5)

    run(spec, folder, resume=True, observers=[watch])
    time.sleep(1)  # a timer that has not gone off yet
    raise SystemExit("the run ended before it was killed")


def interrupt_writes(calls: int, before: bool) -> None:
    """Die at the given call of a function that writes, before it or after it."""
    left = [calls]

    def wrapped(function: Any) -> Any:
        def call(*arguments: Any, **more: Any) -> Any:
            left[0] -= 1
            if left[0] == 0 and before:
                die()
            result = function(*arguments, **more)
            if left[0] == 0:
                die()
            return result

        return call

    for name in WRITES:
        setattr(os, name, wrapped(getattr(os, name)))


def history(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "history.jsonl").read_text().splitlines()
    return [json.loads(line) | {"seconds": 0.0} for line in lines]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--iterations", type=int, default=4, help="the most iterations between two kills")
    times, each = (arguments := parser.parse_args()).times, arguments.iterations
    spec = load_spec("paper", SETTINGS | {"stop.iterations": times * (each + 2)})
    server = multiprocessing.get_context("forkserver")  # imports once; JAX starts anew in every process
    server.set_forkserver_preload(["fedbilevel.cli", "sklearn.datasets"])
    with tempfile.TemporaryDirectory() as place:
        folder, corrupt = Path(place) / "run", 0
        for seed in range(times):
            process = server.Process(target=child, args=(spec, folder, seed, each))
            process.start()
            process.join()
            if process.exitcode != -signal.SIGKILL:
                corrupt += 1
                print(f"kill {seed}: the resumed run ended with {process.exitcode}")
            if (seed + 1) % 10 == 0:
                print(f"{seed + 1} of {times} kills", file=sys.stderr, flush=True)
        reached = history(folder)[-1]["iteration"]
        final = load_spec("paper", SETTINGS | {"stop.iterations": reached + 2})
        resumed = run(final, folder, resume=True)
        whole = run(final, Path(place) / "whole")
        assert resumed.folder is not None and whole.folder is not None
        same = history(resumed.folder) == history(whole.folder)
        print(
            f"{times} kills, {reached} iterations: {corrupt} corrupted folders; "
            f"the history {'equals' if same else 'DIFFERS FROM'} the uninterrupted one"
        )
        raise SystemExit(0 if same and not corrupt else 1)


if __name__ == "__main__":
    main()
