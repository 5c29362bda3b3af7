"""The clients that a run had to do without are told at its end."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.cli.outcome import show
from fedbilevel.engines import Fault, Reason
from fedbilevel.record import summarise

QUADRATIC = {"problem.name": "quadratic", "data.clients": 4, "stop.iterations": 1}
SINCE = "since round 3 (7 not used; the last: x is not finite)"


def lower(x: Any, y: Any, b: fb.Batch) -> Any:
    """Where a target is 1, the slope at zero is not finite, whereas the loss is."""
    return b.mean((y[0] - b.inputs) ** 2 + jnp.sqrt(1 - b.targets + y[0] * jnp.exp(x[0])))


def upper(x: Any, y: Any, b: fb.Batch) -> Any:
    return b.mean((y[0] - b.inputs) ** 2 + jnp.sqrt(1 - b.targets + x[0])) + x[0] ** 2


def trained(iterations: int, **federation: Any) -> fb.Result:
    parts = [((np.zeros(4), np.full(4, float(i == 2))),) * 2 for i in range(4)]
    method = fb.AggITD(N=1, participation=1.0, lower_steps=2, upper_steps=2, batch_zeta_local="full")
    problem = fb.Problem(jnp.zeros(1), jnp.zeros(1), lower, upper)
    return fb.train(
        problem, fb.clients_from(parts), method, stop={"iterations": iterations}, federation=federation
    )


def test_a_client_without_a_valid_reply_is_told_with_the_reason(capsys: pytest.CaptureFixture[str]) -> None:
    result = trained(2, strikes="never")
    why = result.summary["left_out"]
    assert why.keys() == {"2"}
    assert why["2"] == f"no valid reply {SINCE}"
    show(fb.load_spec("paper", QUADRATIC), result)
    assert f"left out: client 2: {why['2']}" in " ".join(capsys.readouterr().out.split())


def test_a_client_that_was_excluded_is_told_with_the_rounds() -> None:
    why = trained(2).summary["left_out"]["2"]
    assert why == f"excluded from round 9 to 59; no valid reply {SINCE}"


def test_a_client_that_answers_again_is_not_left_out() -> None:
    ledger, reason = fb.Ledger(), Reason(Fault.ABSENT, "no answer")
    for _ in range(4):
        ledger.hear([1], {2: reason, 3: reason})
    ledger.hear([1, 2], {3: reason})
    again = fb.Ledger.from_mapping(ledger.to_mapping())
    assert again.silent == ledger.silent and again.silent.keys() == {3}
    record = {"rounds": 5, "iteration": 1, "test_accuracy": None, "bytes_up": 0, "bytes_down": 0, "seconds": 0.0}
    left = summarise([record], again.to_mapping())["left_out"]
    assert left == {"3": "no valid reply since round -1 (5 not used; the last: no answer)"}
