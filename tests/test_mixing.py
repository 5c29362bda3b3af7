"""FedSOBA corrected by what clients keep, and its steps by pairs of its own rounds, which need no step size."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.advisor import _mixing
from fedbilevel.engines import Loop
from fedbilevel.federation import Federation, drawn_clients
from fedbilevel.layers import Chaos, ChaosSettings
from fedbilevel.problems import QuadraticTask

P, Q, CLIENTS, HALF = 4, 3, 6, 3
RATES = np.repeat([0.4, 0.8, 0.8], [P, Q, Q])


@cache
def task() -> QuadraticTask:
    return fb.Quadratic(size_x=P, size_y=Q, heterogeneity=2.0, rows=2).make(CLIENTS, 0)


@cache
def engine() -> fb.Simulation:
    return fb.Simulation(task().problem, task().clients, devices=1)


def left(x: Any) -> float:
    """||∇f|| as a share of its first value."""
    first, last = (np.linalg.norm(task().hypergradient(np.asarray(each))) for each in (np.zeros(P), x))
    return float(last / first)


def train(method: Any, rounds: int, **more: Any) -> fb.Result:
    how: dict[str, Any] = dict(stop={"rounds": rounds}, engine=engine(), evaluate={"every": 500}) | more
    return fb.train(task().problem, task().clients, method, **how)


def corrected(**more: Any) -> fb.FedSOBA:
    settings: dict[str, Any] = dict(alpha=0.4, beta=0.8, participation=HALF, correction="saga") | more
    return fb.FedSOBA(**settings)


# ---------------------------------------------------------------- the correction


def test_corrected_directions_are_those_of_a_table_of_all_clients() -> None:
    """The same recursion in float64, with a table at the server of what every client sent last."""
    K, k = task().affine_directions
    s, table = np.zeros(P + 2 * Q), np.zeros((CLIENTS, P + 2 * Q))
    rounds = 8
    for t in range(rounds):
        asked = np.arange(CLIENTS) if t == 0 else drawn_clients(0, (t,), CLIENTS, HALF)
        new = K[asked] @ s + k[asked]
        d = table.mean(0) + (new - table[asked]).mean(0)
        table[asked] = new
        s = s - RATES * d
    method, fed = corrected(), Federation(engine())
    end = method.init(task().problem, CLIENTS)
    for _ in range(rounds):
        end = method.step(fed, end)
    np.testing.assert_allclose(np.concatenate([end.x, end.y, end.v]), s, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.concatenate(end.past.mean), table.mean(0), rtol=1e-3, atol=1e-5)
    sent = 4 * (P + 2 * Q) * (CLIENTS + (rounds - 1) * HALF)  # the first round asks all clients
    assert fed.ledger.bytes_up == sent == fed.ledger.bytes_down


def test_a_part_of_the_clients_leads_to_the_stationary_point_only_with_the_correction() -> None:
    assert left(train(corrected(), 120).x) < 1e-4
    assert left(train(corrected(correction="none"), 120).x) > 0.02


def test_a_lost_reply_leaves_no_error_behind() -> None:
    """Every fifth reply is lost, although its client has kept its direction."""
    method = corrected(alpha=0.3, beta=0.5, participation=5)
    fed = Federation(Chaos(Loop(task().problem, task().clients), ChaosSettings(drop=0.2, seed=1)))
    s = method.init(task().problem, CLIENTS)
    for _ in range(80):
        s = method.step(fed, s)
    assert fed.ledger.steps["changed_directions"].rejected > 40
    assert left(s.x) < 1e-3


def test_what_has_no_correction_refuses_it_by_name() -> None:
    with pytest.raises(fb.SettingsError, match=r"correction = 'saga' is wrong with steps = 'adagrad'"):
        train(corrected(steps="adagrad"), 1)
    with pytest.raises(fb.SettingsError, match=r"correction = 'saga' is wrong with minimax = true"):
        train(corrected(minimax=True), 1)


# ---------------------------------------------------------------- the pairs


def test_mixing_without_a_ridge_solves_an_affine_system_in_as_many_rounds_as_it_has_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RIDGE", 1e-13), ("GOOD", np.inf), ("WORSE", np.inf), ("FAR_WORSE", np.inf)):
        monkeypatch.setattr(_mixing, name, value)
    monkeypatch.setattr(_mixing, "ANGLE", -2.0)  # every direction of x passes
    g, blocks = np.random.default_rng(0), [slice(0, 3), slice(3, 5), slice(5, 7)]
    K, k = np.eye(7) + 0.3 * g.normal(size=(7, 7)), g.normal(size=7)
    s, memory, rates = np.zeros(7), dict[str, np.ndarray](), np.ones(3)
    moved = s - 0.1 * k
    _mixing.begun(memory, s, k, moved, blocks)
    memory["radii"] = np.full(3, 1e6, np.float32)
    s = moved
    for _ in range(8):
        d = K @ s + k
        _mixing.learned(memory, s, d)
        s = _mixing.mixed(memory, rates, *_mixing.chosen(memory, rates, s, d, blocks), blocks)
    np.testing.assert_allclose(s, np.linalg.solve(K, -k), atol=2e-3)


def test_a_step_that_made_the_residual_far_worse_is_taken_back_once() -> None:
    blocks, rates = [slice(0, 2), slice(2, 3), slice(3, 4)], np.ones(3)
    memory, s, d = dict[str, np.ndarray](), np.zeros(4), np.ones(4)
    _mixing.begun(memory, s, d, s - d, blocks)
    for expected in (s, s - d):
        _mixing.learned(memory, s - d, -9.0 * d)
        at, _ = _mixing.chosen(memory, rates, s - d, -9.0 * d, blocks)
        np.testing.assert_array_equal(at, expected)
        assert memory["radii"] == pytest.approx(np.asarray([np.sqrt(2), 1.0, 1.0]) / 2)


@pytest.mark.parametrize(("participation", "correction"), [(1.0, "none"), (HALF, "saga")])
def test_automatic_steps_of_fedsoba_measure_nothing_and_arrive(participation: Any, correction: Any) -> None:
    method = fb.FedSOBA(alpha=fb.AUTO, beta=fb.AUTO, participation=participation, correction=correction)
    end = train(method, 40)
    assert left(end.x) < 0.01
    assert end.summary["steps"]["rounds"] == 1 and set(end.summary["steps"]["values"]) == {"alpha", "beta"}
    assert set(end.summary["ledger"]) == {"changed_directions" if correction == "saga" else "three_directions"}


def test_automatic_steps_by_pairs_resume_bit_for_bit(tmp_path: Path) -> None:
    method = fb.FedSOBA(alpha=fb.AUTO, beta=fb.AUTO, rho=fb.AUTO, participation=HALF, correction="saga")
    whole = train(method, 12, stop={"iterations": 12})
    train(method, 5, stop={"iterations": 5}, out=tmp_path / "parts")
    parts = train(method, 12, stop={"iterations": 12}, out=tmp_path / "parts", resume=True)
    assert whole.summary["steps"] == parts.summary["steps"]
    np.testing.assert_array_equal(whole.x, parts.x)


def test_automatic_steps_end_at_the_boundary_of_a_box() -> None:
    """The upper loss is that of the quadratic, and its solution is outside of the box."""
    box = fb.Box(-0.2, 0.2)
    made = task().problem
    problem = fb.Problem(jnp.zeros(P), jnp.zeros(Q), made.lower, made.upper, feasible_x=box)

    def end(method: fb.FedSOBA, rounds: int) -> np.ndarray:
        own = fb.Simulation(problem, task().clients, devices=1)
        how: dict[str, Any] = dict(stop={"rounds": rounds}, engine=own, evaluate={"every": 500})
        return np.asarray(fb.train(problem, task().clients, method, **how).x)

    wanted = end(fb.FedSOBA(alpha=0.2, beta=0.8, participation=1.0), 400)
    found = end(fb.FedSOBA(alpha=fb.AUTO, beta=fb.AUTO, participation=1.0), 60)
    assert np.sum(np.abs(wanted) == np.float32(0.2)) >= 2
    np.testing.assert_allclose(found, wanted, atol=2e-3)
