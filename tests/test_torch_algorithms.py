"""Every algorithm on PyTorch modules, against the JAX loop on the same network and rows."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms import ALGORITHMS

pytest.importorskip("torch")
from torch_cases import METHODS, clients, flat, jax_problem, rows, torch_problem

ITERATIONS = 10


def trained(problem: Any, method: Any, engine: str) -> tuple[np.ndarray, np.ndarray, Any]:
    """The flat x and y after ten outer iterations, and the result."""
    result = fb.train(problem, clients(), method, engine=engine, stop={"iterations": ITERATIONS}, seed=1)
    return flat(result.x), flat(result.y), result


def pair(name: str) -> tuple[Any, Any]:
    """The problem in PyTorch and in JAX, of the kind that a method solves."""
    return pair_of("local" if "local" in getattr(METHODS[name], "lower_kinds", ("global",)) else "global")


@cache
def pair_of(kind: str) -> tuple[Any, Any]:
    """They are made once, as a problem that is made anew compiles its measurements anew."""
    ours = torch_problem(lower_is=kind)
    return ours, jax_problem(ours, lower_is=kind)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_pytorch_agrees_with_the_jax_loop_after_ten_outer_iterations(name: str) -> None:
    ours, theirs = pair(name)
    found, expected = trained(ours, METHODS[name], "loop"), trained(theirs, METHODS[name], "loop")
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)
    assert any(not np.array_equal(a, b) for a, b in zip(found[:2], (ours.flat_x[0], ours.flat_y[0]), strict=True))
    for name_of in ("upper_loss", "lower_loss"):
        assert found[2].history[-1][name_of] == pytest.approx(expected[2].history[-1][name_of], rel=1e-4)


def test_every_algorithm_of_the_library_is_compared() -> None:
    ours = {cls for cls in ALGORITHMS.values() if cls.__module__.startswith("fedbilevel.")}
    assert {type(method) for method in METHODS.values()} == ours


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["fbo-aggitd", "fbo-aggitd, epochs", "lfednest", "gossip", "simfbo", "fedbioacc-local"]
)
def test_the_batched_engine_agrees_with_the_loop_on_clients_of_unequal_sizes(name: str) -> None:
    ours, _ = pair(name)
    found, expected = trained(ours, METHODS[name], "batched"), trained(ours, METHODS[name], "loop")
    for a, b in zip(found[:2], expected[:2], strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_metrics_of_test_rows_are_those_of_jax_and_modules_come_back() -> None:
    from torch import nn

    ours = torch_problem()
    results = [
        fb.train(p, clients(), METHODS["fedsoba"], engine="loop", stop={"iterations": 2}, test=rows(40, 7))
        for p in (ours, jax_problem(ours))
    ]
    assert results[0].history[-1]["test_accuracy"] == results[1].history[-1]["test_accuracy"]
    assert isinstance(results[0].x, nn.Sequential) and isinstance(results[0].y, nn.Linear)
    weight = results[0].y.weight.detach().numpy()
    np.testing.assert_allclose(weight, np.asarray(results[1].y.weight), rtol=1e-5, atol=1e-6)
    assert not np.allclose(weight, ours.y.weight.detach().numpy()), "the modules that were given stay as they are"


@pytest.mark.slow
def test_the_advisor_measures_the_same_as_for_jax() -> None:
    ours = torch_problem()
    method = fb.AggITD(N=2, lam=0.3, alpha=0.1, beta=0.1, lower_steps=2, participation=1.0)
    found, expected = (fb.diagnose(p, clients(), method) for p in (ours, jax_problem(ours)))
    assert found.local_L == pytest.approx(expected.local_L, rel=1e-3)
    assert found.bias == pytest.approx(expected.bias, rel=1e-2)
    assert found.rounds == expected.rounds
