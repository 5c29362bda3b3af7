"""The user's own code that a spec or a site names: whatever it does, the error is one line that says where."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from commands import SMALL, Command, one_line, sets
from fedbilevel import SettingsError
from fedbilevel.federate import load_site

NUMBER = itertools.count()  # every module has a name of its own, because Python imports a name once
FAILURES = {
    "does not parse": ("def make(:\n", "SyntaxError"),
    "imports what is not there": ("import nowhere_at_all\n", "nowhere_at_all"),
    "raises when it is imported": ("raise ZeroDivisionError('at import')\n", "at import"),
    "exits when it is imported": ("import sys; sys.exit(3)\n", "SystemExit"),
    "ends like a generator when it is imported": ("raise GeneratorExit('odd')\n", "odd"),
    "never ends to call itself": ("def f(): f()\nf()\n", "RecursionError"),
    "raises": ("def make(*a, **k):\n    raise KeyError('inside')\n", "KeyError: 'inside'"),
    "exits": ("def make(*a, **k):\n    raise SystemExit('bye')\n", "SystemExit: bye"),
    "wants arguments": ("def make(first, second):\n    pass\n", "first"),
    "says something of two lines": ("def make(*a, **k):\n    raise ValueError('a\\nb')\n", "ValueError: a b"),
}
FIELDS = {"problem.function": "problem.name=python", "data.function": "data.name=python"}


def module(folder: Path, text: str) -> str:
    name = f"broken_code_{next(NUMBER)}"
    (folder / f"{name}.py").write_bytes(
        text.encode().replace(b"\\xff", b"\xff") if "xff" in text else text.encode()
    )
    return name


@pytest.mark.parametrize(("text", "reason"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("field", FIELDS)
def test_a_function_of_a_spec_that_fails_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, text: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"{module(tmp_path, text)}:make"
    for words in (("run", "--out", tmp_path / "run"), ("check",)):
        outcome = command(*words, *sets(FIELDS[field], f"{field}={address}", "data.clients=4"))
        one_line(outcome, 2, f"{field} = '{address}' is wrong: ", reason, "correct it")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "reason"), FAILURES.values(), ids=FAILURES)
@pytest.mark.parametrize("section", ["data", "problem"])
def test_a_function_of_a_site_that_fails_is_one_line(
    command: Command, tmp_path: Path, section: str, text: str, reason: str
) -> None:
    address = f"{module(tmp_path, text)}:make"
    good = module(tmp_path, SITE)
    own = {"data": f"{good}:load", "problem": f"{good}:make"} | {section: address}
    file = tmp_path / "site.toml"
    file.write_text("".join(f"[{name}]\npython = '{value}'\n" for name, value in own.items()))
    one_line(command("site", file), 2, f"{section}.python = '{address}' is wrong: ", reason, "correct it")


SITE = """
import numpy as np, jax.numpy as jnp, fedbilevel as fb
def load():
    return (np.zeros((4, 2)), np.zeros(4, int)), (np.zeros((1, 2)), np.zeros(1, int))
def make():
    return fb.Problem(jnp.zeros(3), jnp.zeros(2), lambda x, y, b: jnp.sum(y), lambda x, y, b: jnp.sum(x))
"""
OWN = """
import fedbilevel as fb
from fedbilevel.algorithms import AggITD

@fb.settings
class RaisesWhenMade:
    N: int = 1
    needs_server = True
    def __post_init__(self): raise KeyError("made")
    def init(self, problem, clients): ...
    def step(self, fed, state): ...
    def build(self, problem, clients): ...

@fb.settings
class RaisesWhenChecked:
    needs_server = True
    def check(self, clients): raise KeyError("checked")
    def init(self, problem, clients): ...
    def step(self, fed, state): ...

@fb.settings
class RaisesWhenBuilt:
    def build(self, problem, clients): raise KeyError("built")

@fb.settings
class ExitsWhenBuilt:
    def build(self, problem, clients): raise SystemExit("built")

@fb.settings
class Needs:
    size: int
    needs_server = True
    def init(self, problem, clients): ...
    def step(self, fed, state): ...
    def build(self, problem, clients): ...
"""


@pytest.mark.parametrize(
    ("table", "name", "reason"),
    [
        ("algorithm", "RaisesWhenMade", "KeyError: 'made'"),
        ("algorithm", "RaisesWhenChecked", "KeyError: 'checked'"),
        ("algorithm", "Needs", "algorithm.size"),
        ("federation.engine", "RaisesWhenMade", "KeyError: 'made'"),
        ("federation.engine", "RaisesWhenBuilt", "KeyError: 'built'"),
        ("federation.engine", "ExitsWhenBuilt", "SystemExit: built"),
        ("federation.engine", "Needs", "federation.engine.size"),
    ],
)
def test_a_class_of_a_spec_that_fails_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, name: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"{module(tmp_path, OWN)}:{name}"
    own = () if table == "algorithm" else SMALL
    words = sets(
        "problem.name=quadratic", "data.clients=4", *own, f"{table}.name=python", f"{table}.class={address}"
    )
    outcome = command("run", *words, "--out", tmp_path / "run")
    one_line(outcome, 2, table, reason)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "reason"), list(FAILURES.values())[:6], ids=list(FAILURES)[:6])
@pytest.mark.parametrize("table", ["algorithm", "problem", "federation.engine", "federation.aggregator"])
def test_a_class_whose_module_fails_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: str, text: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    address = f"{module(tmp_path, text)}:Mine"
    words = sets(f"{table}.name=python", f"{table}.class={address}")
    one_line(command("run", *words, "--out", tmp_path / "run"), 2, f"{table}.class = '{address}'", reason)
    assert not (tmp_path / "run").exists()


def test_the_line_names_the_place_in_the_users_own_file(tmp_path: Path) -> None:
    name = module(tmp_path, SITE.replace("return fb", "\n    return 1 / 0, fb"))
    (tmp_path / "site.toml").write_text(f"[data]\npython = '{name}:load'\n[problem]\npython = '{name}:make'\n")
    with pytest.raises(
        SettingsError, match=rf"ZeroDivisionError: division by zero; correct it \({name}\.py, line 7\)"
    ) as error:
        load_site(tmp_path / "site.toml")
    assert isinstance(error.value.__cause__, ZeroDivisionError), "the library keeps the traceback"


def test_an_interrupt_stays_an_interrupt(tmp_path: Path) -> None:
    name = module(tmp_path, "raise KeyboardInterrupt\n")
    (tmp_path / "site.toml").write_text(f"[data]\npython = '{name}:load'\n[problem]\npython = '{name}:make'\n")
    with pytest.raises(KeyboardInterrupt):
        load_site(tmp_path / "site.toml")
