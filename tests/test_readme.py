"""The examples in the documentation: their Python runs, and every command that is shown exists."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command

import fedbilevel as fb
from fedbilevel.cli import app
from fedbilevel.engines.flare import SitePolicy

ROOT = Path(__file__).parent.parent
ELSEWHERE = (
    "CONTRIBUTING.md",
    "SECURITY.md",
    "deploy/README.md",
    "examples/README.md",
    "examples/momentum/README.md",
)
PAGES = [ROOT / "README.md", *(ROOT / name for name in ELSEWHERE), *sorted((ROOT / "docs").rglob("*.md"))]
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
            found.append(words[1 : words.index(">")] if ">" in words else words[1:])
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


# Whose Python is run, and by whom. Here block by block, or as one program where the blocks belong together.
HERE = (
    "extending",
    "after-the-run",
    "upper-level",
    "start",
    "steps",
    "engines",
    "leaderboard",
    "comparison",
    "torch",
)
DEEPER = ("algorithms/local-lower", "learn/hypergradient", "reference/run-folder", "reference/wire")
SINGLE = ("README.md", "examples/momentum/README.md", *(f"docs/{name}.md" for name in HERE + DEEPER))
TOGETHER = ("docs/learn/own-problem.md", "docs/theory.md")
# By `make walk`, with the commands between the blocks, and by another test. The home page has that of the README.
WALKED = tuple(
    f"docs/{name}.md" for name in ("learn/choosing", "learn/federation", "learn/trust", "howto/recipes")
)
TRIED = {"CONTRIBUTING.md": "test_leaderboard.py", "docs/index.md": "test_readme.py"}

RUN = [
    pytest.param(code, id=f"{name}, Python block {number}")
    for name in SINGLE
    for number, code in enumerate(blocks(ROOT / name, "python"))
] + [pytest.param("\n".join(blocks(ROOT / name, "python")), id=f"{name}, all of its Python") for name in TOGETHER]


@pytest.mark.parametrize("code", RUN)
@pytest.mark.slow
def test_the_python_of_a_page_runs_as_it_stands(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    for extra in re.findall(r"^from (torch|transformers)\b", code, re.MULTILINE):
        pytest.importorskip(extra)
    monkeypatch.chdir(tmp_path)
    program = compile(code, request.node.name, "exec", dont_inherit=True)  # without the future of this file
    exec(program, {"__name__": "__main__"})


def test_the_home_page_of_the_site_shows_the_example_of_the_readme() -> None:
    assert blocks(ROOT / "docs" / "index.md", "python") == blocks(ROOT / "README.md", "python")


def test_somebody_runs_the_python_of_every_page() -> None:
    with_python = {page.relative_to(ROOT).as_posix() for page in PAGES if blocks(page, "python")}
    assert with_python == {*SINGLE, *TOGETHER, *WALKED, *TRIED}
    walked = re.search(r"^walk:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert walked is not None and all(name in walked[1] for name in WALKED)
    for name, test in TRIED.items():
        assert name in (ROOT / "tests" / test).read_text()


# Other blocks ------------------------------------------------------------------------------------------

SHELLS = ("", "sh", "bash", "console")
OTHERS = {
    "export",
    "cd",
    "nvflare",
    "ray",
    "printf",
    "docker",
    "tools/tag.sh",
}  # programs that are not ours, or of a shell
TOLD = ("docs/architecture.md", "docs/faults.md")  # pages that also show text without a language
TARGETS = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_is_typed_names_files_and_targets_that_exist(page: Path) -> None:
    for text in (block for language in SHELLS for block in blocks(page, language)):
        for line in text.replace("\\\n", " ").splitlines():
            words = [word for word in shlex.split(line, comments=True) if word != "$"]
            while words and VARIABLE.match(words[0]):
                words.pop(0)
            match words:
                case [] | ["pip", "install", *_] | ["python", "-c", *_]:
                    pass
                case ["make", *targets]:
                    assert {each for each in targets if "=" not in each} <= TARGETS, line
                case ["python", "-m", module, *_]:
                    assert module == "pytest" or (ROOT / "src" / f"{module.replace('.', '/')}.py").exists(), line
                case ["python", file, *_]:
                    assert (ROOT / file).is_file(), line
                case [program, *_]:
                    known = program in OTHERS or Path(program).name == "fedbilevel"
                    assert known or page.relative_to(ROOT).as_posix() in TOLD or page.name == "federate.md", line


SITES = {"docs/federate.md", "docs/privacy.md"}  # whose TOML is that of a site
OWN = {"docs/extending.md"}  # whose TOML names a module that the page writes


@pytest.mark.parametrize(
    ("page", "text"),
    [
        pytest.param(page, text, id=f"{page.relative_to(ROOT)}, TOML {number}")
        for page in PAGES
        for number, text in enumerate(blocks(page, "toml"))
    ],
)
def test_a_toml_that_is_shown_is_read_by_what_reads_it(page: Path, text: str, tmp_path: Path) -> None:
    values, name = tomllib.loads(text), page.relative_to(ROOT).as_posix()
    if name in SITES:
        if "policy" in values:
            SitePolicy(**values["policy"])
        assert values.keys() <= {"audit", "data", "problem", "policy", "privacy", "steps"}
    elif "drop" in values:
        fb.ChaosSettings(**values)
    elif name in OWN:
        assert values.keys() <= {"problem", "algorithm", "stop"}
    else:
        (tmp_path / "my.toml").write_text(text)
        fb.load_spec(tmp_path / "my.toml", {"stop.rounds": 10})
