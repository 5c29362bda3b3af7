"""SECURITY.md: every test that it names exists, and every cell of its tables says something."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
TEXT = (TESTS.parent / "SECURITY.md").read_text()
NAMED = sorted(set(re.findall(r"(test_\w+\.py)::(test_\w+)", TEXT)))


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_is_named_exists(file: str, name: str) -> None:
    assert re.search(rf"(?m)^def {name}\(", (TESTS / file).read_text()), f"{file} has no {name}"


def test_every_cell_names_a_test_or_says_that_there_is_no_protection() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("| ") and not line.startswith("| who attacks")]
    assert len(lines) == 10
    for line in lines:
        who, *cells = [cell.strip() for cell in line.strip("|").split("|")]
        assert len(cells) == 3, who
        for cell in cells:
            assert "::" in cell or "not protected" in cell or "(to be named: " in cell, (who, cell)
