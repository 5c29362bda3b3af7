"""The reference: every public name is in it once, and says what it is."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import fedbilevel as fb

ROOT = Path(__file__).parent.parent


def test_every_public_name_is_in_the_reference_once() -> None:
    listed = re.findall(
        r"^::: fedbilevel\.(?:run\.)?(\w+)$", (ROOT / "docs" / "reference" / "api.md").read_text(), re.MULTILINE
    )
    assert sorted(listed) == sorted(fb.__all__)


def test_every_public_class_and_function_has_a_docstring_of_its_own() -> None:
    for name in fb.__all__:
        value = getattr(fb, name)
        if inspect.isclass(value):
            own = vars(value).get("__doc__") or ""
            assert own and not own.startswith(f"{name}("), f"{name} has only the text that a dataclass is given"
        elif inspect.isfunction(value) or inspect.ismodule(value):
            assert value.__doc__, name


def test_every_page_that_the_site_lists_exists() -> None:
    pages = re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text())
    elsewhere = set(re.findall(r'": "([\w-]+\.md)"', (ROOT / "website" / "hooks.py").read_text()))
    made = {page for page in pages if page.startswith("reference/settings-")}
    made |= {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.py")}
    assert len(pages) > 30
    assert [p for p in pages if p not in elsewhere | made and not (ROOT / "docs" / p).exists()] == []
