"""Text that others wrote, in files and in arguments: what is wrong with it is refused in one clear line."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import QUADRATIC, Command, one_line, sets
from fedbilevel import SettingsError, load_spec
from fedbilevel.federate import load_site

LONG = "x" * 5000  # No file system has names of this length.
DIGITS = "9" * 5000  # Python refuses to read a number of so many digits.
DEEP = 100_000
PARTS = 3000  # Of a key; the time and memory of `tomllib` grow with the square of them.
BROKEN = {
    "a number of 5,000 digits": (f"algorithm.N = {DIGITS}", "4300 digits"),
    "a number of 5,000 hexadecimal digits": (f"algorithm.N = 0x{'f' * 5000}", "64 bits"),
    "lists in lists": (f"algorithm.N = {'[' * DEEP}{']' * DEEP}", "nested"),
    "tables in tables": (f"algorithm.N.{'.'.join('a' * PARTS)} = 1", "nested"),
    "tables in inline tables": (f"algorithm.N = {'{a = ' * DEEP}1{'}' * DEEP}", "nested"),
}


@pytest.mark.parametrize(("text", "reason"), BROKEN.values(), ids=BROKEN)
@pytest.mark.parametrize("kind", ["run", "chaos", "site"])
def test_a_file_that_no_reader_of_toml_survives_is_named_with_the_reason(
    command: Command, tmp_path: Path, kind: str, text: str, reason: str
) -> None:
    file = tmp_path / "broken.toml"
    file.write_text(text)
    out = ("--out", tmp_path / "run")
    arguments = {"run": ("run", file, *out), "chaos": ("run", *sets(*QUADRATIC), *out, "--chaos", file)}
    outcome = command(*arguments.get(kind, ("site", file)))
    one_line(outcome, 2, f"{file} is not TOML", reason)
    assert len(outcome.err) < 500
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("text", "reason"), list(BROKEN.values())[:3], ids=list(BROKEN)[:3])
def test_a_value_on_the_command_line_that_no_reader_survives_is_named_with_the_reason(
    command: Command, tmp_path: Path, text: str, reason: str
) -> None:
    key, _, value = text.partition(" = ")
    outcome = command("run", "--set", f"{key}={value}", "--out", tmp_path / "run")
    one_line(outcome, 2, "--set algorithm.N", reason)
    assert len(outcome.err) < 500
    outcome = command("tune", "--grid", f"{key}={value};2", "--out", tmp_path / "run")
    one_line(outcome, 2, "--grid algorithm.N", reason)
    assert len(outcome.err) < 500
    assert not (tmp_path / "run").exists()


def test_a_key_of_very_many_parts_is_refused(command: Command, tmp_path: Path) -> None:
    outcome = command("run", "--set", f"algorithm.N.{'.'.join('a' * DEEP)}=1", "--out", tmp_path / "run")
    one_line(outcome, 2, "algorithm.N", "nested")
    assert len(outcome.err) < 500


def test_a_value_of_any_length_has_a_message_of_one_screen(command: Command, tmp_path: Path) -> None:
    for setting in (f"data.name={LONG}", f"algorithm.N={LONG}", f"problem.name={LONG}", f"algorithm.{LONG}=1"):
        outcome = command("run", "--set", setting, "--out", tmp_path / "run")
        one_line(outcome, 2)
        assert len(outcome.err) < 1000


def test_a_number_that_python_cannot_print_is_refused_in_the_library_too() -> None:
    with pytest.raises(SettingsError, match=r"^algorithm\.N = .* is wrong"):
        load_spec("demo", {"algorithm.N": 16**5000})
    with pytest.raises(SettingsError, match=r"^seed = .* is wrong"):
        load_spec("demo", {"seed": 16**5000})


def test_a_file_whose_path_is_too_long_is_refused_with_the_reason(command: Command, tmp_path: Path) -> None:
    path, out = tmp_path / LONG, ("--out", tmp_path / "run")
    for who, outcome in {
        "spec": command("run", path, *out),
        "--chaos": command("run", *sets(*QUADRATIC), *out, "--chaos", path),
        "site": command("site", path),
        "spec ": command("theory", path),
        "spec  ": command("data", "show", path),
        "spec   ": command("tune", path, "--grid", "algorithm.N=1", *out),
    }.items():
        one_line(outcome, 2, f"{who.strip()} {path} cannot be read: File name too long; give")
    picture = command("data", "show", *sets("data.name=digits"), "--picture", path)
    assert picture.code == 2 and "--picture" in picture.err and picture.err.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_path_with_a_nul_is_refused_with_the_reason(command: Command, tmp_path: Path) -> None:
    """Typer reads most paths and refuses a NUL itself, as a wrong use. A spec may also be a name."""
    path, out = tmp_path / "a\0b", ("--out", tmp_path / "run")
    for outcome in (
        command("run", path, *out),
        command("run", *sets(*QUADRATIC), *out, "--chaos", path),
        command("run", *sets(*QUADRATIC), "--out", path),
        command("site", path),
        command("federate", "--out", path, "--simulate-sites", 1),
        command("theory", path),
        command("data", "show", path),
        command("data", "show", *sets("data.name=digits"), "--picture", path),
        command("tune", path, "--grid", "algorithm.N=1", *out),
    ):
        assert outcome.code == 2 and "embedded null byte" in outcome.err and "Traceback" not in outcome.err
    for read in (load_spec, load_site):
        with pytest.raises(SettingsError, match="cannot be read: no file has such a name"):
            read(path)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["a\0b", "a.b\0", "\0", LONG, "a\x1b[2Jb"])
def test_a_name_with_characters_that_no_name_has_is_refused(command: Command, tmp_path: Path, name: str) -> None:
    for field, more in {
        "problem.name": (),
        "algorithm.name": (),
        "data.name": (),
        "federation.engine.name": (),
        "problem.function": ("problem.name=python",),
        "data.function": ("data.name=python",),
        "algorithm.class": ("algorithm.name=python",),
        "federation.engine.class": ("federation.engine.name=python",),
    }.items():
        outcome = command("run", *sets(*more, f"{field}={name}"), "--out", tmp_path / "run")
        one_line(outcome, 2, field.partition(".")[0])
        assert "\0" not in outcome.err and "\x1b" not in outcome.err, "a terminal would obey it"
    assert not (tmp_path / "run").exists()
