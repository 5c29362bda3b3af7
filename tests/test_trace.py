"""The trace of a run's rounds: it has what the ledger booked, and counts the rows that are used."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from fedbilevel import Epochs, Federation, PerClient, Sample, Samples, Simulation
from fedbilevel.algorithms import AggITD, FedNest, LFedNest, NaiveITD
from fedbilevel.data import ClientSize
from fedbilevel.problem import Task
from fedbilevel.spec import load_spec
from fedbilevel.studies.counting import rows_drawn
from fedbilevel.studies.trace import Traced, TracedRound, loops, trace

SMALL: dict[str, Any] = dict(participation=3, lower_steps=2, batch_zeta_local=1, upper_steps=2)


def floats(rounds: list[TracedRound], *books: str) -> int:
    return sum(sum(getattr(one, book).values()) for one in rounds for book in books)


@pytest.mark.parametrize(
    "method",
    [
        AggITD(N=2, **SMALL),
        AggITD(N=2, estimator="summed", lower_solver="sgd", **SMALL),
        FedNest(N=2, T=3, **SMALL),
        FedNest(N=1, T=2, mode="released_code", **SMALL),
        LFedNest(N=2, **SMALL),
        NaiveITD(N=3, **SMALL),
    ],
    ids=lambda method: f"{type(method).__name__}-{method.lower_solver}-{getattr(method, 'mode', '')}",
)
def test_a_trace_has_the_rounds_and_the_vectors_that_the_ledger_booked(quadratic: Any, method: Any) -> None:
    engine = Traced(Simulation(quadratic.problem, quadratic.clients, devices=1))
    fed = Federation(engine)
    method.step(fed, method.init(quadratic.problem))
    assert Counter(one.step for one in engine.noted) == {k: a.rounds for k, a in fed.ledger.steps.items()}
    assert 4 * 3 * floats(engine.noted, "up") == fed.ledger.bytes_up
    assert 4 * 3 * floats(engine.noted, "held", "down") == fed.ledger.bytes_down


def traced_iteration(method: AggITD, task: Any, Q: int) -> list[TracedRound]:
    engine = Traced(Simulation(task.problem, task.clients, devices=1))
    fed = Federation(engine).cohort(method.participation)
    start = method.init(task.problem)
    fed.hold(x=start.x)
    method.improve(fed, *method.lower_part(fed, start, Q))
    return engine.noted


def test_a_draw_that_a_step_is_offered_but_does_not_use_is_no_sample(quadratic: Any) -> None:
    """N = 2 and Q = 1: the rows for ∇_y f are used at t = 1 only, those of the Hessian product at t = 2 only."""
    method = AggITD(N=2, batch_zeta=5, batch_xi=3, batch_u=2, batch_chi=4, batch_xi_local=7, **SMALL)
    rounds = traced_iteration(method, quadratic, Q=1)
    assert [(one.step, one.gradients, one.products) for one in rounds] == [
        ("gradients", 5, 0),
        ("lower_steps", 2, 0),
        ("gradients", 5 + 3, 0),
        ("lower_steps", 2, 0),
        ("gradients", 0, 2),
        ("hypergradient", 3, 4),
        ("upper_steps", 14, 0),
    ]
    assert [one.taken for one in rounds[::2]] == [("g_y",), ("g_y", "f_y"), ("g_yy",), ("f_x",)]
    assert [one.local for one in rounds] == [False, True, False, True, False, False, True]


def test_samples_are_a_mean_over_clients_of_unequal_size(digits: Task) -> None:
    method = AggITD(N=1, participation=1.0, lower_epochs=2)
    rounds = traced_iteration(method, digits, Q=1)
    sizes = [digits.clients.size(i) for i in range(digits.clients.count)]
    lower, upper = (sum(part) / len(sizes) for part in zip(*sizes, strict=True))
    assert len({size.lower for size in sizes}) > 1
    expected = [(lower, 0), (2 * lower, 0), (upper, 0), (upper, lower), (upper, 0)]
    assert [(one.gradients, one.products) for one in rounds] == [pytest.approx(pair) for pair in expected]


def test_the_rows_of_every_kind_of_draw() -> None:
    size = ClientSize(lower=7, upper=4)
    assert rows_drawn(Sample("lower"), 0, size) == 7
    assert rows_drawn(Sample("upper", 3), 0, size) == 3
    assert rows_drawn(Sample("upper", 9), 0, size) == 4
    assert rows_drawn(Samples("lower", 2, PerClient((5, 6))), 1, size) == 12
    assert rows_drawn(Samples("upper", None, 3), 1, size) == 12
    assert rows_drawn(Epochs("lower", 2, 5), 0, size) == rows_drawn(Epochs("lower", None, 5), 0, size) == 35


@pytest.mark.parametrize(
    ("steps", "found"),
    [
        ("", []),
        ("ab", []),
        ("aa", [(0, 2)]),
        ("glglghu", [(0, 5)]),
        ("abababab", [(0, 8)]),
        ("ababcdddhu", [(0, 4), (5, 8)]),
        ("aabb", [(0, 2), (2, 4)]),
    ],
)
def test_a_loop_is_a_block_of_rounds_that_is_repeated(steps: str, found: list[tuple[int, int]]) -> None:
    assert loops(steps) == found


def test_a_spec_is_traced_iteration_by_iteration() -> None:
    sets: dict[str, Any] = {
        "problem.name": "quadratic", "data.clients": 4, "algorithm.name": "naive-itd", "algorithm.N": 2,
    }  # fmt: skip
    iterations = trace(load_spec("paper", sets), 2)
    assert [len(rounds) for rounds in iterations] == [8, 8]
    assert [one.step for one in iterations[0]] == [one.step for one in iterations[1]]
