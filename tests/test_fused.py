"""The engine `fused`: the same numbers and the same books as the simulation, with the rounds inside of a program."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS
from fedbilevel.problems import Quadratic, QuadraticTask

ITERATIONS = 6


@pytest.fixture(scope="module")
def task() -> QuadraticTask:
    """Six clients, whose rows differ, so that a minibatch matters."""
    return Quadratic(size_x=3, size_y=4, noise=1.0).make(clients=6, seed=0)


def train(task: Any, method: Any, engine: Any, **more: Any) -> fb.Result:
    options = dict(stop={"iterations": ITERATIONS}, evaluate={"every": 4}, seed=3) | more
    return fb.train(task.problem, task.clients, method, engine=engine, **options)


def books(result: fb.Result) -> Any:
    """The ledger without its seconds."""
    return {
        book: {step: {k: v for k, v in account.items() if k != "seconds"} for step, account in accounts.items()}
        for book in ("ledger", "probes")
        if (accounts := result.summary.get(book)) is not None
    }


def agree(one: fb.Result, other: fb.Result) -> None:
    """The same parameters, books and history, up to rounding."""
    for a, b in zip(jax.tree.leaves((one.x, one.y)), jax.tree.leaves((other.x, other.y)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert books(one) == books(other)
    assert len(one.history) == len(other.history) > 2
    for line, same in zip(one.history, other.history, strict=True):
        assert line.keys() == same.keys()
        for name, value in line.items():
            if name != "seconds" and not (value is None and same[name] is None):
                assert value == pytest.approx(same[name], rel=1e-4, abs=1e-5), name


SETTINGS: dict[str, dict[str, Any]] = {
    "fbo-aggitd": dict(N=3, alpha=0.1, beta=0.1, lam=0.3, participation=1.0),
    "fednest": dict(N=1, T=3, alpha=0.1, beta=0.1, lam=0.3, participation=1.0),
    "lfednest": dict(N=1, T=3, alpha=0.1, beta=0.1, lam=0.3, participation=1.0, lower_solver="sgd"),
    "naive-itd": dict(N=2, alpha=0.1, beta=0.1, lam=0.3, participation=1.0),
    "gossip": dict(alpha=0.1, gamma=0.1, b=2, L_g=2.0),
    "ma-dsbo": dict(alpha=0.1, beta=0.1, gamma=0.3, T=2, N=3),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_method_agrees_with_the_simulation(task: QuadraticTask, name: str) -> None:
    method = ALGORITHMS[name](**SETTINGS[name])
    agree(train(task, method, "fused"), train(task, method, "simulation"))
