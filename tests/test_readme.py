"""The examples in the documentation: their Python runs, and every command that is shown exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

from fedbilevel.cli import app

ROOT = Path(__file__).parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
VARIABLE = re.compile(r"\w+=")  # an assignment in front of a command, as in JAX_PROCESS_ID=0 fedbilevel ...


def blocks(page: Path, language: str) -> list[str]:
    """Return the code blocks of a page that are marked with this language, or with none if it is empty."""
    return [text for name, text in BLOCK.findall(page.read_text()) if name == language]


def commands(text: str) -> list[list[str]]:
    """Return the arguments of every `fedbilevel` command in a block, without comments."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while words and VARIABLE.match(words[0]):
            words.pop(0)
        if words and Path(words[0]).name == "fedbilevel":
            found.append(words[1:])
    return found


def parse(arguments: list[str]) -> None:
    """Parse the arguments of a command without running it. A wrong one raises an error."""
    command: Any = get_command(app)
    rest, name = list(arguments), "fedbilevel"
    while hasattr(command, "commands"):
        name = rest.pop(0)
        assert name in command.commands, f"{name} is not a command"
        command = command.commands[name]
    command.make_context(name, rest)


SHOWN = [
    pytest.param(arguments, id=f"{page.name}: {shlex.join(arguments)}")
    for page in PAGES
    for language in ("", "sh", "bash", "console")
    for text in blocks(page, language)
    for arguments in commands(text)
]


@pytest.mark.parametrize("arguments", SHOWN)
def test_a_command_that_is_shown_exists_with_its_options(arguments: list[str]) -> None:
    parse(arguments)


def test_commands_are_found_behind_variables_and_over_several_lines() -> None:
    text = "A=1 fedbilevel run --set a=1 \\\n    --out b   # a comment\npip install 'fedbilevel[flare]'\n"
    assert commands(text) == [["run", "--set", "a=1", "--out", "b"]]
    assert len(SHOWN) > 20


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("walk --out x", "walk is not a command"),
        ("data sell mnist", "sell is not a command"),
        ("run --nothing", "No such option: --nothing"),
        ("federate --simulate-sites none", "valid int"),
        ("check a.toml b.toml", "unexpected extra argument"),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str, message: str) -> None:
    with pytest.raises(Exception) as raised:
        parse(line.split())
    assert message in str(getattr(raised.value, "message", raised.value))


# The pages whose Python is run, block by block. The blocks of a tutorial are one program.
NAMES = ("extending", "after-the-run", "upper-level", "algorithms/local-lower", "start", "learn/hypergradient")
TUTORIALS = ("learn/own-problem",)
RUN = [
    pytest.param(code, id=f"{page.name}, Python block {number}")
    for page in (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in NAMES))
    for number, code in enumerate(blocks(page, "python"))
] + [
    pytest.param("\n".join(blocks(ROOT / "docs" / f"{name}.md", "python")), id=f"{name}, all of its Python")
    for name in TUTORIALS
]


@pytest.mark.parametrize("code", RUN)
@pytest.mark.slow
def test_the_python_of_a_page_runs_as_it_stands(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    monkeypatch.chdir(tmp_path)
    program = compile(code, request.node.name, "exec", dont_inherit=True)  # without the future of this file
    exec(program, {"__name__": "__main__"})
