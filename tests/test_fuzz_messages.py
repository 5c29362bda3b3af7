"""A short run of the fuzz of messages; `python benchmarks/fuzz_messages.py` is the long one."""

from __future__ import annotations

from typing import Any

import pytest

from fedbilevel.engines.flare import server
from fuzz_messages import DIRECTIONS, ESCAPED, fuzz

REASONS = {
    "to the server": {"malformed", "misfit", "stale", "failed", "not finite"},
    "to a site": {"request", "failed"},
}


@pytest.mark.slow
@pytest.mark.parametrize("direction", DIRECTIONS)
def test_every_mutated_message_is_accepted_or_refused_by_name(direction: str) -> None:
    complaints: list[str] = []
    outcome = fuzz(direction, 1000, 0, complaints.append)
    assert outcome[ESCAPED] == 0, complaints[0]
    assert sum(outcome.values()) == 1000 and outcome["accepted"] > 50
    assert outcome.keys() - {"accepted", ESCAPED} >= REASONS[direction]


@pytest.mark.slow
def test_the_fuzz_notices_an_exception_that_nobody_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = server.unpack  # type: ignore[attr-defined]

    def careless(data: Any, limit: int = 0) -> Any:
        if not isinstance(data, bytes):
            raise TypeError("it expects bytes")
        return reader(data, limit) if limit else reader(data)

    monkeypatch.setattr(server, "unpack", careless)
    assert fuzz("to the server", 500, 0)[ESCAPED] > 0
