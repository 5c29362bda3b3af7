"""The reference: every public name is in it once, and says what it is."""

from __future__ import annotations

import inspect
import re
from functools import cached_property
from pathlib import Path

import pytest

import fedbilevel as fb

ROOT = Path(__file__).parent.parent
DEFAULTS = {"_elsewhere", "<lambda>"}  # functions that are the default of a field


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


@pytest.mark.parametrize("name", [name for name in fb.__all__ if inspect.isclass(getattr(fb, name))])
def test_every_public_method_of_a_public_class_has_a_docstring(name: str) -> None:
    """The reference leaves out what has none."""
    without = [of for of, value in vars(getattr(fb, name)).items() if of[0] != "_" and undocumented(value)]
    assert without == []


def undocumented(value: object) -> bool:
    """Whether a member of a class is a method or a property without a docstring. A default is neither."""
    match value:
        case property():
            value = value.fget
        case cached_property():
            value = value.func
        case classmethod() | staticmethod():
            value = value.__func__
    return inspect.isfunction(value) and value.__name__ not in DEFAULTS and not value.__doc__


def test_every_page_that_the_site_lists_exists() -> None:
    pages = re.findall(r"[\w/.-]+\.md", (ROOT / "mkdocs.yml").read_text())
    elsewhere = set(re.findall(r'": "([\w-]+\.md)"', (ROOT / "website" / "hooks.py").read_text()))
    made = {page for page in pages if page.startswith("reference/settings-")}
    made |= {f"notebooks/{path.stem}.md" for path in (ROOT / "notebooks").glob("*.py")}
    assert len(pages) > 30
    assert [p for p in pages if p not in elsewhere | made and not (ROOT / "docs" / p).exists()] == []
