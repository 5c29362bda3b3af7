"""Schedules of step sizes: the same on all engines, exact after a resume, and better than constant ones."""

from __future__ import annotations

import dataclasses
from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.problems import QuadraticTask
from fedbilevel.schedules import Power, decay_of, scheduled
from fedbilevel.settings import to_mapping

ROOT: dict[str, Any] = {"name": "power", "exponent": 0.5, "offset": 4.0}


@cache
def task() -> QuadraticTask:
    return fb.Quadratic(size_x=3, size_y=2, noise=1.0).make(clients=6, seed=0)


@cache
def method() -> fb.FedSOBA:
    return fb.FedSOBA(alpha=0.3, beta=0.5, participation=2, batch_zeta=2, batch_xi=2, schedule=ROOT)


def train(own: Any, iterations: int, **more: Any) -> fb.Result:
    how: dict[str, Any] = dict(stop={"iterations": iterations}, evaluate={"every": iterations}) | more
    return fb.train(task().problem, task().clients, own, **how)


def test_a_factor_multiplies_the_step_sizes_and_begins_at_one() -> None:
    assert scheduled(method(), 0) == method()
    later = scheduled(method(), 12)
    assert [later.alpha, later.beta] == pytest.approx([0.15, 0.25]) and later.rho is None
    assert scheduled(fb.FedSOBA(), 12) == fb.FedSOBA(), "step sizes are constant by default"


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        (fb.AggITD(schedule="power"), {"alpha": 0.5, "beta": 0.5}),  # a series begins anew, so λ stays
        (
            fb.AggITD(schedule="power", upper={"name": "adam", "learning_rate": 0.1}),
            {"beta": 0.5},
        ),  # Optax has schedules of its own
        (fb.MADSBO(schedule="power"), {"alpha": 0.5, "beta": 0.5}),
        (fb.SimFBO(schedule="power", rho=0.1), {"alpha": 0.5, "beta": 0.5, "rho": 0.5}),
        (fb.FedBiOAcc(schedule="power"), {"alpha": 0.5, "beta": 0.5, "renewal": 1.0}),
        (fb.FedBiOAcc(schedule="paper"), {"alpha": 1 / 3, "beta": 1 / 3, "renewal": 2 / 3}),
        (fb.FedF2SA(schedule="paper"), {"alpha": 4 / 7, "beta": 4 / 7, "nu": 1 / 7}),
    ],
)
def test_what_a_schedule_multiplies(own: Any, expected: dict[str, float]) -> None:
    assert decay_of(own) == expected


def test_a_round_is_sent_the_step_sizes_of_its_iteration() -> None:
    """A step of plain gradient descent, whose length is told by the closed form."""
    plain = fb.FedAvg(control="upper-only", alpha=0.1, participation=1.0, schedule=ROOT)
    x, (_, _, _, J, c) = np.zeros(3), task().means
    for t in range(5):
        x = x - 0.1 * (1 + t / 4) ** -0.5 * (J[:3, :3] @ x + c[:3])
    np.testing.assert_allclose(train(plain, 5, engine="loop").x, x, atol=1e-5)


def test_fused_many_and_resumed_runs_are_those_of_the_simulation(tmp_path: Any) -> None:
    alone = train(method(), 6)
    fused = fb.Fused(task().problem, task().clients)
    np.testing.assert_allclose(train(method(), 6, engine=fused).x, alone.x, rtol=1e-4, atol=1e-6)
    for engine in ("simulation", "fused"):
        folder: dict[str, Any] = dict(out=tmp_path / engine, resume=True, engine=engine, evaluate={"every": 2})
        train(method(), 4, **folder)
        went_on = train(method(), 6, **folder)
        np.testing.assert_allclose(went_on.x, alone.x, rtol=1e-4, atol=1e-6)
        if engine == "simulation":
            np.testing.assert_array_equal(went_on.x, alone.x)
    both = fb.train_many(
        task().problem,
        task().clients,
        method(),
        settings=[{"alpha": 0.2}, {"alpha": 0.3}],
        stop={"iterations": 6},
        devices=1,
    )
    np.testing.assert_allclose(both[1].x, alone.x, rtol=1e-4, atol=1e-6)
    assert not np.allclose(both[0].x, both[1].x, rtol=1e-3)


def test_with_a_cohort_and_minibatches_steps_that_fall_end_closer_than_constant_ones() -> None:
    left = {}
    for schedule in ("constant", ROOT):
        own = dataclasses.replace(method(), schedule=schedule)
        how: dict[str, Any] = dict(seeds=range(8), stop={"iterations": 400}, evaluate={"every": 400}, devices=1)
        ends = fb.train_many(task().problem, task().clients, own, **how)
        left[str(schedule)] = np.mean([np.linalg.norm(task().hypergradient(np.asarray(end.x))) for end in ends])
    assert left[str(ROOT)] < 0.5 * left["constant"], left


def test_automatic_step_sizes_follow_the_schedule() -> None:
    own = fb.FedNest(alpha=0.1, beta=fb.AUTO, participation=1.0, lower_steps=1, batch_zeta_local="full")
    falls = dataclasses.replace(own, schedule={"name": "power", "exponent": 2.0})
    found = [train(each, 3, stop={"iterations": 3}) for each in (own, falls)]
    assert found[0].summary["steps"]["values"] == found[1].summary["steps"]["values"]
    assert not np.allclose(found[0].y, found[1].y, rtol=1e-3)


def test_a_schedule_that_cannot_work_is_refused_by_name() -> None:
    for own, message in (
        (fb.FedNest(schedule="paper"), "schedule = 'paper' is wrong: FedNest has no decay"),
        (fb.AggITD(schedule="power", estimator="cg", memory=4), "wrong with algorithm.memory"),
    ):
        with pytest.raises(fb.SettingsError, match=message):
            train(own, 1)
    with pytest.raises(fb.SettingsError, match=r"algorithm\.schedule =.*'slow'"):
        fb.FedSOBA(schedule="slow")
    with pytest.raises(fb.SettingsError, match=r"algorithm\.schedule\.exponent = -1"):
        fb.FedSOBA(schedule={"name": "power", "exponent": -1.0})


def test_a_spec_tells_the_schedule_only_if_it_is_set() -> None:
    assert to_mapping(fb.FedSOBA(schedule=ROOT))["schedule"] == ROOT
    assert "schedule" not in to_mapping(fb.FedSOBA(), changed=True)
    assert fb.FedSOBA(schedule=Power(exponent=0.5)) == fb.FedSOBA(schedule="power")
    assert jnp.ndim(scheduled(method(), jnp.float32(3)).alpha) == 0
