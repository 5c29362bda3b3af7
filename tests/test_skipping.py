"""The lower solver "skip": y* without drift, corrections that sum to zero, and rounds at random times."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.skipping import skip_loop
from fedbilevel.problems import QuadraticTask

CLIENTS = 5


@cache
def task() -> QuadraticTask:
    return fb.Quadratic(size_x=3, size_y=4, heterogeneity=1.0).make(CLIENTS, 0)


def federation(engine: Any = None, **more: Any) -> fb.Federation:
    return fb.Federation(engine or fb.Simulation(task().problem, task().clients, devices=1), **more)


def test_the_fixed_point_is_the_solution_where_plain_local_steps_drift() -> None:
    x, start = jnp.full(3, 0.5), jnp.zeros(4)
    solution = task().solution(x)
    engine = fb.Simulation(task().problem, task().clients, devices=1)
    for chance in (0.1, 0.3):
        fed = federation(engine)
        fed.hold(x=x)
        y = skip_loop(fed, start, steps=600, chance=chance, beta=0.9, rows=None)
        assert np.linalg.norm(np.asarray(y) - solution) < 3e-6 * np.linalg.norm(solution) + 1e-6
        assert engine.capabilities.states is not None
        kept = [engine.capabilities.states.read(client, fed.ledger.clock) for client in range(CLIENTS)]
        for own, A, B, b in zip(kept, task().A, task().B, task().b, strict=True):
            np.testing.assert_allclose(np.ravel(own["r"]), A @ solution + B @ x + b.mean(0), atol=1e-4)
    plain = fb.FedNest(lower_solver="sgd", lower_steps=10, beta=0.9, batch_zeta_local="full", participation=1.0)
    fed = federation(engine)
    fed.hold(x=x)
    drifted = plain.lower_loop(fed, plain.init(task().problem)._replace(x=x), 60).y
    assert np.linalg.norm(np.asarray(drifted) - solution) > 0.05


def test_the_corrections_sum_to_zero_after_every_communication() -> None:
    engine = fb.Loop(task().problem, task().clients)
    fed, states = federation(engine, seed=1), engine.capabilities.states
    assert states is not None
    y = jnp.zeros(4)
    for x in jnp.eye(3):
        fed.hold(x=x)
        y = skip_loop(fed, y, steps=9, chance=0.3, beta=0.5, rows=2)
        r = np.stack([np.ravel(states.read(i, fed.ledger.clock)["r"]) for i in range(CLIENTS)])
        assert np.abs(r).max() > 0.01 or x[0] == 1
        np.testing.assert_allclose(r.sum(0), 0, atol=1e-5)


def test_the_ledger_has_a_round_for_every_coin_and_one_at_the_end() -> None:
    method = fb.FedNest(
        N=2, T=1, lower_solver="skip", lower_steps=10, chance=0.2, batch_zeta_local="full", participation=1.0
    )
    fed = federation(seed=4)
    state, expected, iterations = method.init(task().problem), 0, 12
    for _ in range(iterations):
        expected += 1 + int((fed.rng("coins").random(19) < 0.2).sum())
        state = method.step(fed, state)
    account = fed.ledger.steps["skipping_steps"]
    assert account.rounds == expected
    assert account.bytes_up == 4 * CLIENTS * 4 * expected, "q numbers, and no round for a correction"
    mean, spread = 1 + 19 * 0.2, (19 * 0.2 * 0.8 / iterations) ** 0.5
    assert abs(expected / iterations - mean) < 4 * spread
    assert fed.ledger.rounds == expected + iterations * (1 + 3)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        (fb.FedNest(lower_solver="skip", lower_steps=5, participation=0.5), "participation = 0.5 is wrong with"),
        (fb.AggITD(lower_solver="skip", lower_steps=5, participation=1.0), "lower_solver = 'skip' is wrong"),
        (fb.FedNest(lower_solver="skip", participation=1.0), "lower_steps = None is wrong"),
        (fb.FedNest(lower_solver="skip", lower_steps=5, participation=1.0, momentum_y=0.5), "momentum_y = 0.5"),
        (fb.FedNest(lower_solver="skip", lower_steps=5, participation=1.0, beta=fb.AUTO), "beta = 'auto'"),
    ],
)
def test_what_does_not_go_with_it_is_refused_by_name(method: Any, message: str) -> None:
    with pytest.raises(fb.SettingsError, match=rf"algorithm\.{message}"):
        fb.train(task().problem, task().clients, method, stop={"iterations": 1})


def test_a_robust_rule_is_refused_because_the_corrections_need_the_mean() -> None:
    method = fb.FedNest(lower_solver="skip", lower_steps=5, participation=1.0)
    with pytest.raises(fb.SettingsError, match=r"lower_solver = 'skip' is wrong with federation\.aggregator"):
        fb.train(
            task().problem, task().clients, method, stop={"iterations": 1}, federation={"aggregator": "median"}
        )


def test_a_run_with_conjugate_gradients_reaches_the_stationary_point_and_resumes_exactly(tmp_path: Any) -> None:
    method = fb.AggITD(
        alpha=0.3,
        beta=0.5,
        lower_solver="skip",
        lower_steps=8,
        estimator="cg",
        batch_zeta_local="full",
        participation=1.0,
    )
    how: dict[str, Any] = dict(evaluate={"every": 50}, engine="simulation")
    folder: dict[str, Any] = dict(out=tmp_path / "run", resume=True)
    problem, clients = task().problem, task().clients
    fb.train(problem, clients, method, stop={"iterations": 3}, **how, **folder)
    went_on = fb.train(problem, clients, method, stop={"iterations": 60}, **how, **folder)
    whole = fb.train(problem, clients, method, stop={"iterations": 60}, **how)
    np.testing.assert_array_equal(went_on.x, whole.x)
    assert np.linalg.norm(task().hypergradient(np.asarray(whole.x))) < 1e-3
