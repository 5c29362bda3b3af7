"""q-FedAvg: one round by hand, FedAvg at q = 0, and the minimum of the powers of the losses as its end."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.algorithms.qfedavg import LEAST

CENTRES = np.array([[0.0, 1.0], [3.0, -1.0], [1.0, 0.5]])
OFFSETS = np.array([0.5, 0.2, 0.1])


def parabolas() -> tuple[fb.Problem, Any]:
    """F_i(w) = 1/2 ||w - a_i||² + b_i with b_i > 0, for x at the upper level and for y at the lower one."""

    def loss(w: Any, batch: fb.Batch) -> Any:
        return batch.mean(0.5 * jnp.sum((w - batch.inputs) ** 2, -1) + batch.targets)

    rows = [
        (a[None].astype(np.float32), b[None].astype(np.float32)) for a, b in zip(CENTRES, OFFSETS, strict=True)
    ]
    start = jnp.asarray([0.3, -0.4])
    problem = fb.Problem(
        x=start, y=start, lower=lambda x, y, b: loss(y, b) + 0 * jnp.sum(x), upper=lambda x, y, b: loss(x, b)
    )
    return problem, fb.clients_from([(each, each) for each in rows])


def ends(method: Any, iterations: int = 1) -> tuple[np.ndarray, np.ndarray]:
    problem, clients = parabolas()
    how: dict[str, Any] = dict(stop={"iterations": iterations}, evaluate={"every": iterations}, engine="fused")
    end = fb.train(problem, clients, method, **how)
    return np.asarray(end.x), np.asarray(end.y)


def by_hand(w: np.ndarray, q: float, eta: float, tau: int) -> np.ndarray:
    """One round with all clients, in float64, as the paper's Algorithm 2 writes it."""
    above, below, L = np.zeros(2), 0.0, 1 / eta
    for a, b in zip(CENTRES, OFFSETS, strict=True):
        own = w.copy()
        for _ in range(tau):
            own = own - eta * (own - a)
        F, change = 0.5 * np.sum((w - a) ** 2) + b, L * (w - own)
        above = above + F**q * change
        below += q * F ** (q - 1) * np.sum(change**2) + L * F**q
    return w - above / below


@pytest.mark.parametrize(("q", "tau"), [(0.0, 3), (0.5, 1), (2.0, 3)])
def test_a_round_is_that_of_the_formulas_at_either_level(q: float, tau: int) -> None:
    start = np.array([0.3, -0.4])
    expected = by_hand(start, q, 0.2, tau)
    x, y = ends(fb.QFedAvg(q=q, alpha=0.2, tau=tau, participation=1.0))
    np.testing.assert_allclose(x, expected, rtol=1e-5)
    np.testing.assert_allclose(y, start, rtol=1e-6)
    x, y = ends(fb.QFedAvg(control="lower-only", q=q, beta=0.2, tau=tau, participation=1.0))
    np.testing.assert_allclose(y, expected, rtol=1e-5)
    np.testing.assert_allclose(x, start, rtol=1e-6)


def test_with_q_zero_it_is_fedavg_also_with_a_cohort_and_unequal_steps() -> None:
    own: dict[str, Any] = dict(control="upper-only", alpha=0.1, tau=(1, 2, 4), participation=2)
    fair, plain = (ends(method, 7)[0] for method in (fb.QFedAvg(q=0.0, **own), fb.FedAvg(**own)))
    np.testing.assert_allclose(fair, plain, rtol=1e-5)


def test_it_ends_where_the_powers_of_the_losses_are_least_and_serves_the_worst_client() -> None:
    """With one local step the fixed point has Σ_i F_i^q ∇F_i = 0. For q = 0 that is the mean of the centres."""
    worst = []
    for q in (0.0, 1.0, 5.0):
        x, _ = ends(fb.QFedAvg(q=q, alpha=1.0, participation=1.0), 400)
        losses = 0.5 * np.sum((x - CENTRES) ** 2, -1) + OFFSETS
        slope = losses**q @ (x - CENTRES) / np.sum(losses**q)
        np.testing.assert_allclose(slope, 0.0, atol=1e-4)
        worst.append(losses.max())
    assert worst[0] > worst[1] > worst[2]


def test_a_loss_of_nothing_moves_nothing_and_a_negative_power_is_refused() -> None:
    def loss(x: Any, y: Any, b: fb.Batch) -> Any:
        return b.mean(jnp.sum((x - b.inputs) ** 2, -1)) + 0 * jnp.sum(y)

    rows = np.zeros((2, 1), np.float32), np.zeros(2, np.float32)
    problem, clients = fb.Problem(jnp.zeros(1), jnp.zeros(1), loss, loss), fb.clients_from([(rows, rows)])
    end = fb.train(problem, clients, fb.QFedAvg(q=5.0, participation=1.0), stop={"iterations": 2})
    assert float(end.x[0]) == 0.0 and LEAST**5 < 1e-38  # h is zero in float32
    with pytest.raises(fb.SettingsError, match="q"):
        fb.load_spec("fair", {"algorithm.name": "q-fedavg", "algorithm.q": -1.0})
