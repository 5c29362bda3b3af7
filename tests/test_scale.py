"""Registering clients costs nothing: memory and time grow with the cohort."""

from __future__ import annotations

import tracemalloc

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
