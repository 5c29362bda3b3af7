"""A ten-round trace of FBO-AggITD with its ledger, as it was when it was last looked at.

XLA_FLAGS= FEDBILEVEL_WRITE_GOLDEN=1 .venv/bin/pytest tests/test_golden.py writes it anew; say why in the commit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbilevel import AggITD, Federation, Simulation
from fedbilevel.problem import Task

GOLDEN = Path(__file__).parent / "golden" / "aggitd-digits.json"


@pytest.fixture(scope="module")
def traced(digits: Task) -> dict[str, Any]:
    """Two outer iterations at N = 1, with every kind of sampling in them."""
    algorithm = AggITD(
        N=1, alpha=0.1, beta=0.05, lam=0.3, participation=5, lower_epochs=1, upper_steps=2, batch_u=8, batch_xi=4
    )
    fed = Federation(Simulation(digits.problem, digits.clients, devices=1), seed=0)
    state, states = algorithm.init(digits.problem), []
    for _ in range(2):
        state = algorithm.step(fed, state)
        states.append(
            {
                name: {"norm": float(np.linalg.norm(v)), "first": np.asarray(v[:5], np.float64).tolist()}
                for name, v in state._asdict().items()
            }
        )
    ledger = fed.ledger.to_mapping()
    for account in [*ledger["steps"].values(), *ledger["probes"].values()]:
        assert account.pop("seconds") > 0
    return {"states": states, "rounds": fed.ledger.rounds, "ledger": ledger}


@pytest.fixture(scope="module")
def golden(traced: dict[str, Any]) -> dict[str, Any]:
    if os.environ.get("FEDBILEVEL_WRITE_GOLDEN") == "1":
        GOLDEN.parent.mkdir(exist_ok=True)
        GOLDEN.write_text(json.dumps(traced, indent=1) + "\n")
    return json.loads(GOLDEN.read_text())


def test_the_trace_has_ten_rounds(traced: dict[str, Any]) -> None:
    assert traced["rounds"] == 10


def test_the_ledger_is_exactly_the_golden_one(traced: dict[str, Any], golden: dict[str, Any]) -> None:
    assert json.loads(json.dumps(traced["ledger"])) == golden["ledger"]
    assert traced["rounds"] == golden["rounds"]


def test_the_states_are_the_golden_ones(traced: dict[str, Any], golden: dict[str, Any]) -> None:
    assert len(traced["states"]) == len(golden["states"]) == 2
    for got, expected in zip(traced["states"], golden["states"], strict=True):
        for name in ("x", "y"):
            assert got[name]["norm"] == pytest.approx(expected[name]["norm"], rel=1e-5)
            typical = max(abs(v) for v in expected[name]["first"])
            np.testing.assert_allclose(got[name]["first"], expected[name]["first"], rtol=1e-5, atol=1e-5 * typical)
