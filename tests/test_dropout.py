"""Losses with random choices: dropout in the features, with masks that have an address."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fakes import Watching
from fedbilevel.algorithms import FedNest
from fedbilevel.data import DataSettings
from fedbilevel.engines import pad, prepare
from fedbilevel.heads import norm
from fedbilevel.problem import Task
from fedbilevel.problems import HyperRepresentation
from fedbilevel.problems.representation import dropped
from fedbilevel.rng import Address, Kind
from fedbilevel.spec import parse
from fedbilevel.steps import Draw, Samples, draw, svrg
from wires import in_process_sites

DATA = DataSettings(name="digits", clients=4, partition="dirichlet")
METHOD = fb.AggITD(lower_steps=3, upper_steps=2, participation=1.0, batch_zeta_local=8, beta=0.1, alpha=0.1, N=2)


def task(**settings: Any) -> Task:
    return HyperRepresentation(hidden=8, regulariser="ridge", **settings).task(DATA, 0)


def after(engine: fb.Engine, method: Any = METHOD, iterations: int = 2) -> Any:
    fed, state = fb.Federation(engine), method.init(engine.problem, engine.clients.count)
    for _ in range(iterations):
        state = method.step(fed, state)
    return state


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["derivative", "step"])
def test_all_engines_have_the_same_masks(masks: Any) -> None:
    """A site pads its rows to another length than the simulation, so masks must not depend on the padding."""
    two = dataclasses.replace(DATA, clients=2)  # each site compiles for its own number of rows
    made, bare = (
        HyperRepresentation(hidden=8, regulariser="ridge", dropout=p, dropout_masks=masks).task(two, 0)
        for p in (0.5, 0.0)
    )
    assert made.clients.size(0) != made.clients.size(1)
    method = dataclasses.replace(METHOD, N=1, lower_steps=2)
    simulated = after(fb.Simulation(made.problem, made.clients), method)
    for engine in (fb.Loop(made.problem, made.clients), in_process_sites(made.problem, made.clients)):
        state = after(engine, method)
        np.testing.assert_allclose(state.x, simulated.x, atol=2e-6)
        np.testing.assert_allclose(state.y, simulated.y, atol=2e-6)
    without = after(fb.Simulation(bare.problem, made.clients), method)
    assert not np.allclose(without.y, simulated.y, atol=1e-3)


def test_masks_are_those_of_torch_in_distribution_and_keep_the_mean() -> None:
    features = jnp.ones((400, 50))
    out = np.asarray(dropped(features, 0.25, jax.random.key(0)))
    np.testing.assert_allclose(np.unique(out), [0.0, 1 / 0.75], rtol=1e-6)
    assert abs(out.mean() - 1) < 0.02
    assert dropped(features, 0.25, None) is features


def test_dropout_behind_the_relu_is_dropout_in_front_of_it() -> None:
    before = jax.random.normal(jax.random.key(1), (30, 20))
    key = jax.random.key(2)
    np.testing.assert_array_equal(
        jax.nn.relu(dropped(before, 0.5, key)), np.abs(dropped(jax.nn.relu(before), 0.5, key))
    )


def oracle_of(made: Task) -> tuple[Any, Draw]:
    """The oracle of client 0 in a round, and the rows of a draw."""
    engine = Watching(fb.Loop(made.problem, made.clients))
    after(engine, iterations=1)
    call = next(call for call in engine.calls if call.step.name == "hypergradient")
    data, size = made.clients.load(0), made.clients.size(0)
    held, arrays = call.vectors, pad(data, size)
    c = made.problem.oracle(held, arrays, made.problem.remember(held["x"], arrays))
    return c, prepare(call, made.problem, 0, size, size)["chi"]


@pytest.mark.parametrize(("masks", "equal"), [("derivative", False), ("step", True)])
@pytest.mark.slow
def test_each_derivative_of_a_draw_has_its_own_mask_or_they_share_one(masks: Any, equal: bool) -> None:
    """The gradient and the Hessian product share a mask exactly if the gradient's derivative is the product."""
    c, rows = oracle_of(task(dropout=0.5, dropout_masks=masks))
    v = jax.random.normal(jax.random.key(3), c.y.shape)
    along = jax.jvp(lambda y: c.g_y(y, rows), (c.y,), (v,))[1]
    assert np.allclose(along, c.g_yy(c.y, v, rows), atol=1e-6) is equal
    np.testing.assert_array_equal(c.g_y(c.y, rows), c.g_y(c.y, rows))  # a mask has an address
    assert np.allclose(c.g_y(c.y, rows), c.g_y(c.y, rows.apart(1)), atol=1e-6) is equal


@pytest.mark.slow
def test_the_stored_features_give_the_derivatives_of_live_ones_with_masks() -> None:
    c, rows = oracle_of(task(dropout=0.5))
    live = jnp.array(c.x, copy=True)
    v = jax.random.normal(jax.random.key(4), c.y.shape)
    for stored, fresh in (
        (c.f_x(c.y, rows), c.f_x(c.y, rows, at=live)),
        (c.g_xy(c.y, v, rows), c.g_xy(c.y, v, rows, at=live)),
        (c.g_y(c.y, rows), c.g_y(c.y, rows, at=live)),
    ):
        np.testing.assert_allclose(stored, fresh, atol=1e-5)


def test_svrg_with_masks_is_its_formula_written_out() -> None:
    rng = np.random.default_rng(0)
    A = jnp.asarray(rng.normal(size=(6, 3)), jnp.float32)

    def gradient(v: Any, b: Draw) -> Any:
        assert b.chance is not None
        mask = jax.random.bernoulli(b.chance.key(4), 0.5, (6,))
        return A.T @ (mask * (A @ v))

    anchor, q = jnp.ones(3), jnp.asarray([0.5, -0.2, 0.1])
    for chances in ("derivative", "step"):
        stream = draw(Samples("lower", None, 3), Address(0, Kind.ROUND, 5), "zeta", 0, 6, 6, chances)
        v = np.asarray(anchor, float)
        for step in range(3):
            b = jax.tree.map(lambda a, i=step: a[i], stream.draws)
            v = v - 0.1 * (np.asarray(gradient(v, b)) - np.asarray(gradient(anchor, b.apart(1))) + np.asarray(q))
        traced = jax.tree.map(jnp.asarray, stream)
        np.testing.assert_allclose(svrg(gradient, anchor, q, 0.1, traced), v, rtol=1e-5)


def test_without_dropout_nothing_is_drawn_and_measurements_have_none() -> None:
    plain = draw(Samples("lower", None, 2), Address(0, Kind.ROUND, 0), "zeta", 0, 5, 5)
    assert jax.tree.leaves(plain.draws) == []
    made, bare = task(dropout=0.5), task()
    state = METHOD.init(made.problem, 4)
    assert float(made.measure(state.x, state.y)["test_loss"]) == float(bare.measure(state.x, state.y)["test_loss"])


@pytest.mark.slow
def test_a_run_with_dropout_resumes_bit_for_bit(tmp_path: Any) -> None:
    raw = {
        "problem": {"hidden": 6, "dropout": 0.5, "smoothing": 0.0},
        "data": {"name": "digits", "clients": 6, "partition": "iid"},
        "algorithm": {"name": "fednest", "mode": "released_code", "participation": 0.5, "lower_steps": 2, "T": 2},
        "evaluate": {"checkpoint_every": 1},
    }
    whole = fb.run(parse(raw | {"stop": {"iterations": 3}}), tmp_path / "whole")
    fb.run(parse(raw | {"stop": {"iterations": 1}}), tmp_path / "parts")
    resumed = fb.run(parse(raw | {"stop": {"iterations": 3}}), tmp_path / "parts", resume=True)
    assert [{**r, "seconds": 0} for r in whole.history] == [{**r, "seconds": 0} for r in resumed.history]


@pytest.mark.slow
def test_released_counters_have_a_mask_for_every_product() -> None:
    """c_k = (I - λH_k) ... (I - λH_1) p_0 has another mask in every H, as each forward pass of the scripts has."""
    made = task(dropout=0.5)
    engine = Watching(fb.Loop(made.problem, made.clients))
    after(engine, FedNest(mode="released_code", T=2, participation=1.0, lower_steps=1), 1)
    call = [call for call in engine.calls if call.step.name == "neumann_counter"][-1]
    c, _ = oracle_of(made)
    u = prepare(call, made.problem, 0, made.clients.size(0), made.clients.capacity)["u"]
    v = c.f_y(c.y, u)
    assert not np.allclose(c.g_yy(c.y, v, u.apart(0)), c.g_yy(c.y, v, u.apart(1)), atol=1e-6)


def test_the_exact_norm_has_derivatives_of_zero_at_zero() -> None:
    y = {"w": jnp.asarray([3.0, 4.0]), "b": jnp.zeros(2)}
    assert float(norm(y, 0.0)) == 5.0
    grad = jax.grad(lambda y: norm(y, 0.0))(y)
    np.testing.assert_allclose(grad["w"], [0.6, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(grad["b"], [0.0, 0.0])
