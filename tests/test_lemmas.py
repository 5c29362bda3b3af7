"""Lemmas 1, 2 and 3 of the paper: their terms against fractions, and both sides against the federation."""

from __future__ import annotations

import dataclasses
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from fedbilevel import AggITD, Federation, Quadratic, Simulation
from fedbilevel.algorithms.local import State
from fedbilevel.problems import QuadraticTask
from fedbilevel.studies.theory import gentle_task
from fedbilevel.studies.theory._lemmas import Noise, compare_lemmas, draw_noise, iterate, lemma_study, loss_ratio
from fedbilevel.studies.theory._sampling import Dials
from fedbilevel.theory import Given, Theory

F = Fraction


@pytest.fixture
def simple() -> Theory:
    """M_f = 114, L_f' = 342, L_y = 2, L_yx = 63, σ_h² = 150, D_h² = 900, η = 57 and α = 10⁻¹⁰."""
    given = Given(mu=1, L_g=2, L_f=3, M=5, rho=7, sigma_f=2, sigma_g=3)
    return Theory(given, N=2, lam=0.5, K=100, alpha_bar=1e-9, beta=1 / 16)


def test_the_terms_of_the_lemmas_are_what_fractions_give(simple: Theory) -> None:
    alpha = F(1, 10**10)
    descent = simple.descent_bound(gradient=2.0, direction=3.0, bias=5.0, drift=7.0, gap=11.0)
    expected: list[Any] = [
        -alpha / 2 * 2,
        -alpha / 2 * (1 - 4 * alpha * 342) * 3,
        4 * alpha**2 * (150 + 4) * 342,
        2 * alpha**2 * 25 * 342,
        3 * alpha / 2 * 5,
        3 * alpha / 2 * 114**2 * 7,
        3 * alpha / 2 * 114**2 * 11,
    ]
    assert list(descent) == pytest.approx([float(e) for e in expected], rel=1e-12)
    assert descent.total == pytest.approx(float(sum(expected)))
    assert descent.losses == pytest.approx(float(sum(expected[2:])))
    gamma = 114 * 2 * alpha
    warm = simple.warm_start_bound(direction=3.0, gap=11.0)
    expected = [
        (4 * 4 * alpha**2 + 4 * alpha**2 / (4 * gamma) + 2 * 63 * alpha**2 / 57) * 3,
        (1 + 4 * gamma + F(57 * 63 * 900) * alpha**2 / 2) * 11,
        (4 * alpha**2 * 4 + 2 * 63 * alpha**2 / F(57)) * (2 * 150 + 2 * 4 + 25),
    ]
    assert list(warm) == pytest.approx([float(e) for e in expected], rel=1e-12)
    assert warm.total == pytest.approx(float(sum(expected)))
    drift = simple.drift_bound(gap=11.0, gradient=2.0, bias=5.0)
    expected = [18 * alpha**2 * term for term in (3 * 114**2 * 11, 3 * 2, 5, 3 * 150, 6 * 4)]
    assert list(drift) == pytest.approx([float(e) for e in expected], rel=1e-12)
    assert drift.total == pytest.approx(float(sum(expected)))


def still(task: QuadraticTask) -> QuadraticTask:
    """The task with equal rows, so that nothing but Q is random."""
    return dataclasses.replace(task, b=task.b.mean(1, keepdims=True), c=task.c.mean(1, keepdims=True))


def test_an_iteration_is_the_federations_for_every_q(monkeypatch: pytest.MonkeyPatch) -> None:
    """x⁺ and y⁺, and the left sides of Lemmas 1 and 2 at them, by the closed forms of the task."""
    task = still(Quadratic(size_x=3, size_y=2, condition=4.0, heterogeneity=2.0).make(clients=3, seed=5))
    dials = Dials(N=2, lam=0.4, beta=0.15, tau=3, alpha=0.3)
    x, y = np.array([[0.5, -1.0, 2.0]]), np.array([[1.0, -2.0]])
    algorithm = AggITD(
        N=2, lam=0.4, beta=0.15, alpha=0.3, participation=1.0, lower_steps=3, upper_steps=3, share_steps=True,
        batch_zeta_local="full",
    )  # fmt: skip
    fed = Federation(Simulation(task.problem, task.clients, devices=1))

    def value(at: np.ndarray) -> float:
        z = np.concatenate([at, task.solution(at)])
        return float(0.5 * z @ task.means[3] @ z + task.means[4] @ z)

    for Q in range(3):
        quiet = Noise(np.array([Q]), np.zeros((2, 1, 2)), np.zeros((1, 2)), np.zeros((1, 3)))
        moved, end, found = iterate(task, dials, x, y, quiet)
        forced = SimpleNamespace(integers=lambda _, drawn=Q: drawn)
        monkeypatch.setattr(Federation, "rng", lambda self, name, forced=forced: forced)
        state = algorithm.step(fed, State(jnp.asarray(x[0], jnp.float32), jnp.asarray(y[0], jnp.float32)))
        np.testing.assert_allclose(moved[0], state.x, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(end[0], state.y, rtol=1e-5, atol=1e-5)
        assert found.descent == pytest.approx(value(moved[0]) - value(x[0]), abs=1e-9)
        assert found.next_gap == pytest.approx(float(((end[0] - task.solution(moved[0])) ** 2).sum()))
        assert found.gradient == pytest.approx(float((task.hypergradient(x[0]) ** 2).sum()))
        assert found.gap == pytest.approx(float(((end[0] - task.solution(x[0])) ** 2).sum()))


def test_with_one_local_step_there_is_no_drift_and_the_direction_is_the_mean_over_q() -> None:
    task = still(gentle_task())
    dials = Dials(N=3, lam=0.2, beta=0.1, tau=1, alpha=0.2)
    x, y = np.ones((4, 4)), np.ones((4, 3))
    every = Noise(np.arange(4), np.zeros((3, 4, 3)), np.zeros((4, 3)), np.zeros((4, 4)))
    moved, _, found = iterate(task, dials, x, y, every)
    assert found.furthest == found.drift == 0.0
    mean = (x - moved).mean(0) / 0.2  # over all Q, each of which was drawn once
    assert found.direction == pytest.approx(float((mean**2).sum()))


@pytest.mark.parametrize("seed", range(3))
def test_the_noise_has_the_mean_zero_and_the_variance_of_a_row(seed: int) -> None:
    task, g = gentle_task(), np.random.default_rng(seed)
    noise = draw_noise(task, 5, 4000, g)
    rows = task.b.astype(float)
    variance = (rows.var(1).sum(1)).sum() / len(rows) ** 2  # of the mean over clients, each with one row
    assert (noise.lower**2).sum(-1).mean() == pytest.approx(variance, rel=0.05)
    assert abs(noise.end.mean()) < 0.01
    assert set(noise.Q.tolist()) == set(range(6))


def test_both_sides_are_compared_and_no_lemma_is_violated() -> None:
    data = lemma_study(quick=True)
    for row in data["rows"]:
        assert row["descent_left"] <= row["descent_right"] <= row["descent_restated"]
        assert 0 < row["warm_start_left"] <= row["warm_start_right"]
        assert 0 < row["drift_left"] <= row["drift_right"] <= row["drift_restated"]
        assert row["loss_ratio"] <= 1
    assert all(ratio <= 1 for ratio in (*data["worst_of_run"].values(), *data["worst"].values()))
    assert [data["rows"][k]["k"] for k in (0, 20, -1)] == [0, 20, data["K"] - 1]
    assert data["worst"]["warm_start"] > 0.9, "the factor of the gap in Lemma 2 is close to one"


def test_a_bound_that_is_too_small_would_be_noticed() -> None:
    """With constants far below those of the task, and a step size above the theory's, no lemma holds."""
    task = gentle_task()
    dials = Dials(N=2, lam=0.2, beta=0.1, tau=4, alpha=100.0)
    x = np.full((200, 4), 3.0)
    y = np.broadcast_to(task.solution(x[0]), (200, 3))
    found = iterate(task, dials, x, y, draw_noise(task, 2, 200, np.random.default_rng(0)))[2]
    small = Given(mu=1, L_g=1, L_f=1e-3, M=1e-3)
    theory = Theory(small, N=2, lam=0.2, K=1, alpha_bar=1e-3)
    ratios = {one.name: one.ratio for one in compare_lemmas(theory, found, measured_bias=True)}
    assert ratios["warm_start"] > 1 and ratios["drift"] > 1
    assert loss_ratio(theory, found) > 1
