"""Registering clients costs nothing: memory and time grow with the cohort."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest

from fedbilevel import Federation, LazyClients, Loop, rng
from fedbilevel.data import ListedClients
from fedbilevel.problems import QuadraticTask

MILLION = 1_000_000


def test_a_cohort_of_a_million_clients_takes_the_memory_of_the_cohort(quadratic: QuadraticTask) -> None:
    clients = LazyClients(MILLION, quadratic.clients.capacity, quadratic.clients.load)
    engine = Loop(quadratic.problem, clients)
    Federation(engine).cohort(100)  # what is imported on first use is not counted
    tracemalloc.start()
    fed = Federation(engine, seed=5)
    cohort = fed.cohort(100)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 100_000, "one list of a million numbers has 8 MB"
    drawn = rng.generator(5, "cohort", 0).choice(MILLION, 100, replace=False)
    assert list(cohort.clients) == sorted(drawn.tolist()), "drawn as ever"
    assert all(type(c) is int for c in cohort.clients)
    assert len(fed.clients) == MILLION and fed.clients[-1] == MILLION - 1


def test_all_clients_can_take_part(quadratic: QuadraticTask) -> None:
    fed = Federation(Loop(quadratic.problem, quadratic.clients)).cohort(1.0)
    assert tuple(fed.clients) == tuple(range(20))


def test_the_largest_client_is_looked_for_once(quadratic: QuadraticTask) -> None:
    """Engines ask for the capacity once for each client they load."""

    class Counting(list):  # type: ignore[type-arg]
        looks = 0

        def __getitem__(self, index):  # type: ignore[no-untyped-def]
            self.looks += 1
            return super().__getitem__(index)

    data = Counting(quadratic.clients.data)
    clients = ListedClients(data)
    assert clients.capacity == clients.capacity == quadratic.clients.capacity
    before = data.looks
    assert clients.capacity == (8, 8)
    assert data.looks == before > 0


def peak_memory(clients: int) -> float:
    """MB at the peak of a fresh process that starts with so many clients and makes one outer iteration."""
    script = Path(__file__).parent.parent / "benchmarks" / "registered_clients.py"
    small = ["problem.hidden=8", "data.rows_per_client=20", "algorithm.upper_steps=1", "algorithm.lower_epochs=1"]
    done = subprocess.run(
        [sys.executable, str(script), "--clients", str(clients), "--iterations", "1", "--set", *small],
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    measured = json.loads(done.stdout)
    assert measured["clients"] == clients
    return float(measured["peak_mb"])


@pytest.mark.slow
def test_a_million_clients_take_hardly_more_memory_than_a_thousand() -> None:
    few, many = peak_memory(1000), peak_memory(MILLION)
    assert few > 50, "a process that computes"
    assert many < 1.3 * few


def test_the_peak_of_a_process_is_not_that_of_the_process_that_started_it() -> None:
    """`getrusage` of Linux says so, and then a large parent hides what its children take."""
    script = "import numpy as np\nheld = np.ones(2**26)\n"  # 512 MB
    script += "import subprocess, sys\n"
    script += "child = 'from fedbilevel.runtime import peak_memory; print(peak_memory())'\n"
    script += "subprocess.run([sys.executable, '-c', child], check=True)\n"
    script += "from fedbilevel.runtime import peak_memory, forget_peak\nprint(peak_memory())\n"
    script += "del held\nforget_peak()\nprint(peak_memory())"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    child, before, after = map(int, done.stdout.split())
    assert 50 < child < 450 and before > 560 and after < before - 400


COHORT = """
import sys
from fedbilevel import AggITD, Federation, Simulation
from fedbilevel.data import DataSettings
from fedbilevel.problems import HyperRepresentation
from fedbilevel.runtime import peak_memory
clients = int(sys.argv[1])
task = HyperRepresentation(hidden=2000).task(DataSettings(name="digits", clients=clients), 0)
engine = Simulation(task.problem, task.clients, memory_limit=64, devices=1)
fed, algorithm = Federation(engine), AggITD(upper_steps=1, participation=1.0)
state = algorithm.init(task.problem)
state = algorithm.step(fed, state)
float(state.x[0])
print(peak_memory())
"""


@pytest.mark.slow
def test_a_cohort_beyond_the_memory_limit_takes_no_more_than_one_within_it() -> None:
    """A client's reply of 130,000 numbers takes 0.5 MB: 200 of them at once would take 100 MB for each vector."""

    def peak(clients: int) -> float:
        command = [sys.executable, "-c", COHORT, str(clients)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
        return float(done.stdout)

    few, many = peak(10), peak(200)
    assert many < few + 64
