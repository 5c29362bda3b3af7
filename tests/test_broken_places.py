"""Places to write to that cannot be written: they are refused before any work is done, and left as they were."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import fedbilevel.bench
import fedbilevel.studies.runner
import fedbilevel.studies.theory
from commands import QUADRATIC, Command, one_line, sets
from fedbilevel import files

COMMANDS: dict[str, tuple[Any, ...]] = {
    "run": ("run", *sets(*QUADRATIC)),
    "federate": ("federate", *sets(*QUADRATIC), "--simulate-sites", 1),
    "tune": ("tune", *sets(*QUADRATIC), "--grid", "algorithm.N=1"),
    "reproduce": ("reproduce", "table1"),
    "theory": ("theory", *sets("data.clients=4", "algorithm.lam=0.1"), "--quick"),
    "bench": ("bench",),
}
Bad = Callable[[Path], tuple[Path, str]]


def a_file(folder: Path) -> tuple[Path, str]:
    (folder / "file").write_text("mine")
    return folder / "file", "file"


def below_a_file(folder: Path) -> tuple[Path, str]:
    (folder / "file").write_text("mine")
    return folder / "file" / "below", "Not a directory"


def too_long(folder: Path) -> tuple[Path, str]:
    return folder / ("x" * 5000), "File name too long"


@pytest.fixture(autouse=True)
def no_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a command would do for minutes, before it comes to write its results."""

    def work(*_: object, **__: object) -> None:
        raise AssertionError("work was begun whose results could not be written")

    monkeypatch.setattr(subprocess, "run", work)
    monkeypatch.setattr(fedbilevel.studies.runner._Worker, "begin", work)
    monkeypatch.setattr(fedbilevel.studies.theory, "estimator_study", work)


@pytest.mark.parametrize("bad", [a_file, below_a_file, too_long])
@pytest.mark.parametrize("words", COMMANDS.values(), ids=COMMANDS)
def test_an_out_that_cannot_be_a_folder_is_refused_before_any_work(
    command: Command, tmp_path: Path, words: tuple[Any, ...], bad: Bad, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    path, reason = bad(tmp_path)
    outcome = command(*words, "--out", path)
    assert outcome.code == 2, outcome
    assert outcome.err.startswith(f"error: --out {path} ") and outcome.err.count("\n") == 1
    assert reason in outcome.err and "folder" in outcome.err
    files = [p for p in tmp_path.rglob("*") if p.is_file()]
    assert all(p.read_text() == "mine" for p in files), "nothing was written, and nothing was lost"


@pytest.mark.parametrize("bad", [a_file, below_a_file, too_long])
def test_a_folder_of_runs_or_of_sites_that_cannot_be_made_is_refused(
    command: Command, tmp_path: Path, bad: Bad
) -> None:
    path, reason = bad(tmp_path)
    one_line(command("reproduce", "table1", "--out", tmp_path / "out", "--runs", path), 2, "--runs", reason)
    one_line(command(*COMMANDS["federate"], "--out", tmp_path / "run", "--work", path), 2, "--work", reason)


def test_a_folder_that_only_others_may_write_is_refused(command: Command, tmp_path: Path) -> None:
    """The tests may run as a user who may write everywhere; the file system of processes refuses all of them."""
    for name in ("run", "tune", "reproduce", "theory", "bench"):
        outcome = command(*COMMANDS[name], "--out", "/proc/fedbilevel")
        assert outcome.code == 2 and outcome.err.startswith("error: --out /proc/fedbilevel cannot be written: ")


def test_a_full_disk_at_the_end_is_one_line(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = {"case": "a", "quartiles": [1, 2], "profile": {}, "ours_over_floor": 1.0, "peak_memory_mb": 1}
    row |= {f"{name}_s": None for name in ("floor", "torch_func", "torch_loop")} | {"ours_s": 1.0}
    row |= {"torch_loop_over_ours": None, "torch_func_over_ours": None}
    measured = subprocess.CompletedProcess([], 0, stdout=json.dumps(row))
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: measured)
    (tmp_path / "bench.json").symlink_to("/dev/full")
    outcome = command("bench", "--out", tmp_path)
    assert outcome.code == 1
    assert outcome.err == (
        f"error: {tmp_path} could not be written: No space left on device; make room and repeat the command\n"
    )


@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_number_of_an_option_is_a_number(command: Command, tmp_path: Path, value: str) -> None:
    out = ("--out", tmp_path / "run")
    for words in (
        ("reproduce", "table1", "--share", value),
        ("theory", "--radius", value),
        ("bench", "--seconds", value),
        (*COMMANDS["federate"], "--timeout", value),
    ):
        outcome = command(*words, *out)
        assert outcome.code == 2 and words[-2] in outcome.err and "Traceback" not in outcome.err, words
    assert not (tmp_path / "run").exists()


def test_a_kit_that_cannot_be_read_is_refused(command: Command, tmp_path: Path) -> None:
    startup = tmp_path / "kit" / "startup"
    startup.mkdir(parents=True)
    words = ("federate", *sets(*QUADRATIC), "--out", tmp_path / "run", "--kit")
    deep = "[" * 100_000
    for content in ("", "[]", "{}", '{"admin": 3}', '{"admin": {"username": [1]}}', deep, "\x00"):
        (startup / "fed_admin.json").write_text(content)
        one_line(command(*words, tmp_path / "kit"), 2, f"--kit {tmp_path / 'kit'} is not the kit of an admin")
    too = tmp_path / ("x" * 5000)
    one_line(command(*words, too), 2, f"--kit {too} is not the kit of an admin")
    (tmp_path / "site.toml").write_text("")
    outcome = command("site", tmp_path / "site.toml", "--no-check", "--kit", too)
    one_line(outcome, 2, f"--kit {too} is not the kit of a site")


def test_a_cache_that_cannot_be_used_is_named(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for bad in (tmp_path / ("x" * 5000), Path("/proc/fedbilevel")):
        monkeypatch.setenv("FEDBILEVEL_DATA", str(bad))
        one_line(command("data", "fetch", "mnist"), 2, "FEDBILEVEL_DATA", str(bad))
        listed = command("data", "list")
        assert (listed.code, listed.err) == (0, "")


def test_a_new_folder_is_written_down_in_the_folder_above(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    sync = os.fsync

    def noted(descriptor: int) -> None:
        synced.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    files.make_folder(tmp_path / "a" / "b")
    assert synced == [str(tmp_path), str(tmp_path / "a")]
    files.make_folder(tmp_path / "a" / "b")
    assert len(synced) == 2, "a folder that exists is left alone"
