"""A short run of the fuzz of sites; `python benchmarks/fuzz_sites.py` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

import fedbilevel as fb
from fedbilevel.federate import load_site
from fuzz_sites import ESCAPED, fuzz

PROBLEM = '[problem]\nname = "hyper-representation"\nhidden = 3\nshape = [2, 1, 1]\nclasses = 2\n'
DATA = '[data]\ncsv = "rows.csv"\ninputs = ["a", "b"]\ntargets = "label"\ntarget_type = "int"\n'


@pytest.mark.slow
def test_every_mutated_site_is_loaded_or_refused_with_one_line(tmp_path: Path) -> None:
    complaints: list[str] = []
    outcome = fuzz(300, 0, tmp_path, complaints.append)
    assert outcome[ESCAPED] == 0, complaints[0]
    assert sum(outcome.values()) == 300 and outcome["accepted"] > 30 and outcome["refused (SettingsError)"] > 100


@pytest.mark.parametrize(
    ("above", "problem", "why"),
    [
        ('steps = "os"', PROBLEM, r"^site\.steps = 'os' is wrong"),
        ("steps = inf", PROBLEM, r"^site\.steps = inf is wrong"),
        ("steps = [3]", PROBLEM, r"^site\.steps = 3 is wrong"),
        ("audit = true", PROBLEM, r"^site\.audit = True is wrong"),
        ("", PROBLEM.replace("[2, 1, 1]", "[-1, 2, 1]"), r"^problem\.shape = -1 is wrong"),
        ("", PROBLEM.replace("[2, 1, 1]", "[1000000, 1000000, 1]"), r"^problem\.shape = .* is wrong"),
        ("", PROBLEM.replace("[2, 1, 1]", "[]"), r"^problem\.shape = \[\] is wrong"),
        ("", PROBLEM.replace("classes = 2", "classes = 0"), r"^problem\.classes = 0 is wrong"),
        ("", PROBLEM.replace("classes = 2", "classes = 4611686018427387904"), r"^problem\.classes = .* is wrong"),
        ("", '[problem]\npython = "os:getcwd"\nsize = 3\n', r"^problem\.python = 'os:getcwd' is wrong: "),
        ("", '[problem]\npython = "..:x"\n', r"^problem\.python = '\.\.:x' is wrong: "),
    ],
)
def test_a_setting_of_a_site_that_cannot_be_used_is_named(
    above: str, problem: str, why: str, tmp_path: Path
) -> None:
    (tmp_path / "rows.csv").write_text("a,b,label\n" + "1,2,0\n" * 5)
    (tmp_path / "site.toml").write_text(f"{above}\n{DATA}{problem}")
    with pytest.raises(fb.SettingsError, match=why):
        load_site(tmp_path / "site.toml")


@pytest.mark.parametrize(
    "content", [b"", b"PK\x03\x04" + b"x" * 100, b"\x93NUMPY\x01\x00v\x00{'descr': (", b"plain"]
)
def test_a_file_of_rows_that_cannot_be_read_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "rows.npz").write_bytes(content)
    (tmp_path / "site.toml").write_text(f'[data]\nnpz = "rows.npz"\n{PROBLEM}')
    with pytest.raises(fb.SettingsError, match=r"^data\.npz = 'rows\.npz' is wrong: "):
        load_site(tmp_path / "site.toml")
