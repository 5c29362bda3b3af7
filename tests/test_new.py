"""`fedbilevel new`: the project that it makes passes its own test, runs, and loads as a site."""

from __future__ import annotations

import json
import subprocess
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from commands import Command, contents, one_line

FILES = {"Makefile", "README.md", "problem.py", "site.toml", "spec.toml", "test_problem.py"}
MODULES = ("problem", "test_problem")


@pytest.fixture
def project(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A new project, which is the working folder; its modules are forgotten afterwards."""
    others = {name: sys.modules.pop(name) for name in MODULES if name in sys.modules}
    monkeypatch.chdir(tmp_path)
    made = command("new", "demo-app")
    assert made.code == 0 and "cd demo-app && make test run" in made.out
    monkeypatch.chdir(tmp_path / "demo-app")
    monkeypatch.setattr(sys, "path", [str(tmp_path / "demo-app"), *sys.path])
    yield tmp_path / "demo-app"
    for name in MODULES:
        sys.modules.pop(name, None)
    sys.modules.update(others)


@pytest.mark.slow
def test_a_new_project_passes_its_own_test(project: Path) -> None:
    found = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromName("test_problem").run(found)
    assert found.testsRun == 2 and found.wasSuccessful(), found.failures + found.errors


def test_a_new_project_runs_and_its_curve_has_its_own_metric(project: Path, command: Command) -> None:
    assert command("run", "spec.toml", "--set", "stop.iterations=1", "--out", "runs/first").code == 0
    history = [json.loads(line) for line in (project / "runs/first/history.jsonl").read_text().splitlines()]
    assert [record["rounds"] for record in history] == [0, 23] and history[1]["test_error"] > 4.0
    assert fb.load_run("runs/first").predict(np.ones((5, 30), np.float32)).shape == (5,)


def test_the_file_of_a_site_loads_the_rows_of_its_client(project: Path, command: Command) -> None:
    loaded = command("site", "site.toml")
    assert loaded.out == "15 lower and 15 upper rows; 30 parameters of x and 30 of y\n", loaded


def test_a_new_project_has_its_name_and_interpreter_and_nothing_left_to_fill(project: Path) -> None:
    files = {name: text.decode() for name, text in contents(project).items()}
    assert set(files) == FILES
    assert not [name for name, text in files.items() if "{{" in text or "}}" in text]
    assert files["README.md"].startswith("# demo-app\n") and f"PYTHON ?= {sys.executable}\n" in files["Makefile"]


def test_the_python_of_a_new_project_is_clean(project: Path) -> None:
    for words in (["check", "--select", "E,F,W,B,UP,SIM,RUF,N"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *words, "--isolated", "--line-length", "115", "."]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


def test_what_is_there_is_never_overwritten(command: Command, tmp_path: Path) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    assert command("new", "app", "--out", mine).code == 0, "an empty folder is used"
    (mine / "problem.py").write_text("my work")
    before = contents(mine)
    one_line(command("new", "app", "--out", mine), 2, f"{mine} has files already", "--out")
    assert contents(mine) == before
    (tmp_path / "file").write_text("")
    one_line(command("new", "app", "--out", tmp_path / "file"), 2, "--out", "it is a file")


@pytest.mark.parametrize("name", ["", "9lives", "../up", "a b", "-x.y", "naïve", "a\nb"])
def test_a_bad_name_is_refused_in_one_line(
    name: str, command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one_line(command("new", "--", name), 2, "NAME = ", "begin with a letter")
    assert contents(tmp_path) == {}
