"""Automatic steps of single-loop methods, their diagnosis, and the floor that a run tells at its start."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.problems import QuadraticTask
from fedbilevel.theory import floor_of

CLIENTS = 5


@cache
def task() -> QuadraticTask:
    return fb.Quadratic(size_x=4, size_y=3, heterogeneity=1.0).make(CLIENTS, 0)


@cache
def engine() -> fb.Simulation:
    return fb.Simulation(task().problem, task().clients, devices=1)


def train(method: Any, rounds: int, **more: Any) -> fb.Result:
    how: dict[str, Any] = dict(stop={"rounds": rounds}, engine=engine(), evaluate={"every": 500}) | more
    return fb.train(task().problem, task().clients, method, **how)


@pytest.mark.parametrize("method", [fb.SimFBO, fb.FedMSA, fb.FedF2SA], ids=lambda cls: str(cls.__name__))
def test_automatic_steps_come_from_the_curvatures_and_lead_to_the_fixed_point(method: Any) -> None:
    own = method(alpha=fb.AUTO, beta=fb.AUTO, participation=1.0)
    end = train(own, 200)
    found, (A, *_) = end.summary["steps"]["values"], task().means
    L = float(np.linalg.eigvalsh(A)[-1])
    if method is not fb.FedMSA:  # whose local steps go along the clients' own losses
        assert found["beta"] == pytest.approx(1 / L, rel=0.02)
    assert found["beta"] <= 1.01 / L
    left, start = (float(np.linalg.norm(task().hypergradient(np.asarray(x)))) for x in (end.x, np.zeros(4)))
    assert left < 1.5 * (floor_of(task(), own) or 0.0) + 0.01 * start


def test_the_upper_step_is_no_faster_than_y_can_follow() -> None:
    x, unit = np.zeros(4), np.eye(4)
    slope = np.stack([task().hypergradient(e) - task().hypergradient(x) for e in unit], axis=1)
    h = task().hypergradient(x)
    curvature = float(np.linalg.norm(slope @ h) / np.linalg.norm(h))
    values = train(fb.FedSOBA(alpha=fb.AUTO, beta=0.2, participation=1.0), 1).summary["steps"]["values"]
    mu = float(np.linalg.eigvalsh(task().means[0])[0])
    assert values == {"alpha": pytest.approx(min(0.5, 0.2 * mu) / curvature, rel=0.02)}


def test_adagrad_steps_refuse_auto_by_name() -> None:
    with pytest.raises(fb.SettingsError, match=r"algorithm\.alpha = 'auto' is wrong with steps = 'adagrad'"):
        train(fb.FedSOBA(alpha=fb.AUTO, steps="adagrad", participation=1.0), 1)


def test_a_diagnosis_beside_other_methods_has_the_shares_of_their_series() -> None:
    method = fb.AggITD(lam=0.01, lower_steps=1, batch_zeta_local="full", participation=1.0)
    found = fb.diagnose(task().problem, task().clients, method, beside=True, draws=4, engine=engine())
    A, B, _, J, c = task().means
    y = task().solution(np.zeros(4))
    r = (J @ np.concatenate([np.zeros(4), y]) + c)[4:]
    L = found.spectrum.safe_L

    def share(terms: int, lam: float) -> float:
        p, term = np.zeros(3), r
        for _ in range(terms):
            p, term = p + lam * term, term - lam * A @ term
        whole = B.T @ np.linalg.solve(A, r)
        return float((B.T @ p) @ whole / (whole @ whole))

    shares = [found.share_of(each.estimate) for each in found.beside]
    assert shares[1:] == pytest.approx([share(11, 1 / L), share(10, 1 / L), share(100, 1 / L)], abs=2e-3)
    assert shares[0] == pytest.approx(share(2, 0.01), abs=0.02) and shares[0] < 0.1 < 0.9 < shares[3]
    assert [each.rounds for each in found.beside] == [5, 23, 10, 100]
    told = found.to_mapping()["beside"]
    assert json.loads(json.dumps(told))[1]["method"] == "fbo-aggitd, N = 10, lam = 1/L_g" and "beside" in str(
        found
    )


def test_a_single_loop_method_is_diagnosed_where_v_has_followed() -> None:
    found = fb.diagnose(task().problem, task().clients, fb.FedSOBA(participation=1.0), draws=1, engine=engine())
    assert found.solved and found.implicit_share == pytest.approx(1.0, abs=1e-3)
    assert set(found.recommended) == {"alpha", "beta"}


def test_a_run_on_a_quadratic_tells_where_the_method_ends() -> None:
    drifts, exact = fb.SimFBO(alpha=0.1, beta=0.1, tau=5, participation=1.0), fb.FedSOBA(participation=1.0)
    told = [train(method, 1, closed=task()).summary["floor"] for method in (drifts, exact)]
    floor = floor_of(task(), drifts)
    assert f"{floor:.3g}" in told[0] and "the stationary point" in told[1]
    assert "floor" not in train(drifts, 1).summary
