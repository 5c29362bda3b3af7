"""A site's TOML: every way to name data, and errors that say what is wrong with it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import fedbilevel as fb
from fedbilevel.data import ClientData, Part
from fedbilevel.engines.flare import pack, unpack
from fedbilevel.federate import LoadedSite, load_site
from fedbilevel.federate.sitefile import write_rows
from fedbilevel.problems import Quadratic, QuadraticTask

PROBLEM = '[problem]\nname = "hyper-representation"\nhidden = 3\nshape = [2, 1, 1]\nclasses = 2\n'
ROWS = ClientData(
    Part(np.arange(8, dtype=np.float32).reshape(4, 2), np.asarray([0, 1, 0, 1], np.int32)),
    Part(np.asarray([[8, 9]], np.float32), np.asarray([0], np.int32)),
)
MODULE = """
import numpy as np, jax.numpy as jnp, fedbilevel as fb
def load(rows):
    a = np.arange(2.0 * rows).reshape(rows, 2)
    return (a[:-1], np.zeros(rows - 1, int)), (a[-1:], np.zeros(1, int))
def make(size):
    return fb.Problem(jnp.zeros(size), jnp.zeros(2), lambda x, y, b: jnp.sum(y), lambda x, y, b: jnp.sum(x))
number = 3
"""


def load(folder: Path, data: str, problem: str = PROBLEM) -> LoadedSite:
    file = folder / "site.toml"
    file.write_text(f"[data]\n{data}\n{problem}")
    return load_site(file)


def same(one: ClientData, other: ClientData) -> bool:
    parts = zip(one.parts.values(), other.parts.values(), strict=True)
    pairs = [(a, b) for p, q in parts for a, b in zip(p, q, strict=True)]
    return all(a.dtype == b.dtype and a.tolist() == b.tolist() for a, b in pairs)


def test_rows_come_from_an_npz(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.npz", ROWS)
    made = load(tmp_path, 'npz = "rows.npz"')
    assert same(made.data, ROWS) and made.modules == ()
    assert (made.problem.size_x, made.problem.size_y) == (2 * 3 + 3, 3 * 2 + 2)


def test_a_site_may_have_test_rows_of_its_own(tmp_path: Path) -> None:
    rows = ROWS._replace(test=ROWS.upper)
    write_rows(tmp_path / "rows.npz", rows)
    assert same(load(tmp_path, 'npz = "rows.npz"').data, rows)


def test_rows_come_from_a_folder_of_arrays(tmp_path: Path) -> None:
    (tmp_path / "rows").mkdir()
    for part, rows in ROWS.parts.items():
        np.save(tmp_path / "rows" / f"{part}.inputs.npy", rows.inputs.astype(np.float64))
        np.save(tmp_path / "rows" / f"{part}.targets.npy", rows.targets.astype(np.int64))
    assert same(load(tmp_path, 'folder = "rows"').data, ROWS), "in float32 and int32"


def test_rows_come_from_the_columns_of_a_csv(tmp_path: Path) -> None:
    lines = ["name,b,label,a", *(f"x,{2 * i + 1},{i % 2},{2 * i}" for i in range(5))]
    (tmp_path / "rows.csv").write_text("\n".join(lines))
    columns = 'csv = "rows.csv"\ninputs = ["a", "b"]\ntargets = "label"\n'
    assert same(load(tmp_path, f'{columns}target_type = "int"').data, ROWS)
    assert load(tmp_path, columns).data.lower.targets.dtype == np.float32


def test_rows_and_problem_come_from_functions_beside_the_toml(tmp_path: Path) -> None:
    (tmp_path / "my_site_module.py").write_text(MODULE)
    made = load(
        tmp_path, 'python = "my_site_module:load"\nrows = 5', '[problem]\npython = "my_site_module:make"\nsize = 7'
    )
    assert same(made.data, ROWS._replace(lower=ROWS.lower._replace(targets=np.zeros(4, np.int32))))
    assert (made.problem.size_x, made.problem.size_y) == (7, 2)


def test_a_site_keeps_its_states_beside_its_toml_with_a_folder_for_each_run(tmp_path: Path) -> None:
    write_rows(tmp_path / "rows.npz", ROWS)
    site = load(tmp_path, 'npz = "rows.npz"').site()
    hello = {"kind": "hello", "round": 0, "session": "s", "run": "run7", "sizes": [9, 8]}
    assert unpack(site.answer(pack(hello, {}))).header["kind"] == "welcome"
    site._states.write(0, 0, {"v": (np.ones(2, np.float32),)}, settled=0)
    assert (tmp_path / "states" / "run7" / "0-0.safetensors").exists()


def test_rows_that_are_trees_of_arrays_go_through_an_npz(tmp_path: Path, quadratic: QuadraticTask) -> None:
    own = quadratic.clients.load(3)
    write_rows(tmp_path / "rows.npz", own)
    made = load(tmp_path, 'npz = "rows.npz"', '[problem]\nname = "quadratic"')
    assert made.data.lower.inputs.keys() == own.lower.inputs.keys() and made.data.lower.targets is None
    assert made.data.upper.inputs["J"].tolist() == own.upper.inputs["J"].tolist()
    assert made.problem.size_x == Quadratic().size_x


@pytest.mark.parametrize(
    ("data", "problem", "message"),
    [
        ('npz = "gone.npz"', PROBLEM, r"^data.npz = 'gone.npz' is wrong: .*No such file"),
        (
            'npz = "a"\ncsv = "b"',
            PROBLEM,
            r"^\[data\] names 2 sources; give exactly one of: npz, folder, csv, python",
        ),
        ("", PROBLEM, r"^\[data\] names 0 sources"),
        ('csv = "rows.csv"', PROBLEM, r"^\[data\] csv: .*'inputs'"),
        (
            'csv = "rows.csv"\ninputs = ["a"]\ntargets = "z"',
            PROBLEM,
            r"is wrong: it has no rows, or no columns \['z'\]",
        ),
        ('folder = "."', PROBLEM, r"^data.folder = '.' is wrong: there is no array lower.inputs among \[\]"),
        ('python = "nowhere:load"', PROBLEM, r"^data.python = 'nowhere:load' is wrong: .*write module:attribute"),
        (
            'npz = "rows.npz"',
            '[problem]\nname = "ridge"',
            r"^problem.name = 'ridge' is unknown; use one of: hyper-",
        ),
        ('npz = "rows.npz"', '[problem]\nname = "hyper-representation"', r"needs shape and classes"),
        ('npz = "rows.npz"', "[problem]\nname = 'quadratic'\nsize_z = 3", r"^problem.size_z is not a setting"),
        ('npz = "rows.npz"', "", r"site.toml has no \[problem\]"),
        ('npz = "rows.npz"', f"{PROBLEM}[more]", r"^more is not a setting of a site"),
        ('npz = "rows.npz"', "[problem", r"is not TOML"),
    ],
)
def test_a_mistake_in_a_sites_toml_is_named(tmp_path: Path, data: str, problem: str, message: str) -> None:
    write_rows(tmp_path / "rows.npz", ROWS)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n")
    with pytest.raises(fb.SettingsError, match=message):
        load(tmp_path, data, problem)


def test_a_function_of_a_spec_gives_the_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_spec_module.py").write_text(MODULE.replace("make(size)", "make(size=4)"))
    monkeypatch.chdir(tmp_path)
    spec = fb.load_spec("demo", {"problem.name": "python", "problem.function": "my_spec_module:make"})
    task = spec.task()
    assert task.problem.size_x == 4 and task.clients.count == 100
    with pytest.raises(fb.SettingsError, match="return a Task with clients"):
        task.clients.load(0)
    wrong = fb.load_spec("demo", {"problem.name": "python", "problem.function": "my_spec_module:number"})
    with pytest.raises(fb.SettingsError, match="it is not a function"):
        wrong.task()
