"""What the tests of the command line share: its outcome, and what one clear line looks like."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

SMALL = (
    "algorithm.lower_steps=1",
    "algorithm.upper_steps=1",
    "algorithm.estimator=summed",
    "evaluate.clients=2",
    "stop.rounds=10",
)
TEN = ("data.clients=10", "data.partition=iid", "problem.hidden=4", "algorithm.participation=3")
DIGITS = ("data.name=digits", *TEN, *SMALL)
QUADRATIC = ("problem.name=quadratic", "data.clients=4", "algorithm.participation=1.0", *SMALL)


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


Command = Callable[..., Outcome]


def sets(*settings: str) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def one_line(outcome: Outcome, code: int, *parts: str) -> None:
    """The error is one line that has these parts, and nothing else was printed."""
    assert outcome.code == code, outcome
    assert outcome.err.startswith("error: ")
    assert outcome.err.count("\n") == 1
    assert outcome.err.endswith("\n")
    assert outcome.out == ""
    for part in parts:
        assert part in outcome.err


def contents(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()}
