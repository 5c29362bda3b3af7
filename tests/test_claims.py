"""docs/claims.md: every claim has a command, and every file that a command names exists."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from claims import Claim, claims

ROOT = Path(__file__).parent.parent
FOUND = claims()


@pytest.mark.parametrize("claim", FOUND, ids=lambda claim: claim.text[:60])
def test_a_claim_names_commands_whose_files_exist(claim: Claim) -> None:
    assert claim.tests or claim.scripts
    for command in claim.tests + claim.scripts:
        program, *arguments = shlex.split(command)
        if program == "make":
            assert f"\n{arguments[0]}:" in (ROOT / "Makefile").read_text()
        for each in arguments:
            assert not each.endswith(".py") or (ROOT / each).is_file(), each


def test_a_night_decides_most_claims_and_a_quick_run_has_tests_only() -> None:
    assert len(FOUND) > 25 and sum(bool(claim.chosen()) for claim in FOUND) > 20
    assert all(claim.chosen(quick=True) == claim.tests for claim in FOUND)
    assert all(claim.chosen(every=True) == claim.tests + claim.scripts for claim in FOUND)
    assert [claim.text for claim in FOUND if claim.read and claim.scripts and claim.chosen() != claim.tests] == []
