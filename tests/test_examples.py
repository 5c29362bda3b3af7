"""The two quickest scripts of examples/, with the checks of `make examples`, which runs all of them."""

from __future__ import annotations

from pathlib import Path

import pytest

import test_scripts

pytestmark = pytest.mark.slow
play = test_scripts.play
test_tabular = test_scripts.test_three_tables_are_read_from_their_files_and_are_worth_more_together_than_alone
test_text = test_scripts.test_the_penalties_of_words_find_those_that_mislead


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The figures are not left in the checkout."""
    monkeypatch.chdir(tmp_path)


def test_every_script_has_a_test_and_a_line_in_the_table() -> None:
    here = Path(test_scripts.__file__)
    scripts = {file.stem for file in here.parent.glob("*.py")} - {"byte_model", "hospitals", "showing", here.stem}
    assert len(scripts) == 11
    text, table = here.read_text(), (here.parent / "README.md").read_text()
    for name in scripts:
        assert f'play("{name}")' in text and f"[{name}.py]({name}.py)" in table, name
