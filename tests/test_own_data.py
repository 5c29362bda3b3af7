"""Data sets of the user's own: by the address of a function, and by the entry points of an installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedbilevel import SettingsError, Spec, cli, data, load_spec, run
from fedbilevel.cli import shared
from fedbilevel.data import DataSettings

MODULE = '''
import numpy as np
from fedbilevel.data import Dataset, Entry
from fedbilevel.data._readers import Tables

calls = []

def load(**changes):
    """Two overlapping clouds of three classes, in NumPy's usual types."""
    calls.append(1)
    g = np.random.default_rng(0)
    targets = np.tile(np.arange(3), 50)
    inputs = g.normal(size=(150, 4)) + 2 * targets[:, None]
    made = dict(
        name="clouds",
        train_inputs=inputs[:120],
        train_targets=targets[:120],
        test_inputs=inputs[120:],
        test_targets=targets[120:],
        classes=3,
        shape=(1, 1, 4),
    )
    return Dataset(**made | changes)

class Loader:
    @staticmethod
    def load():
        return load(name="of a class")

def raises():
    raise FileNotFoundError("no file\\nrows.csv")

def with_argument(path):
    return load()

def returns_a_list():
    return [1, 2]

number = 5

def read(files):
    g = np.random.default_rng(0)
    return Tables(g.integers(0, 256, (30, 4), np.uint8), np.tile(np.arange(3), 10).astype(np.uint8),
                  g.integers(0, 256, (6, 4), np.uint8), np.tile(np.arange(3), 2).astype(np.uint8))

def read_wrongly(files):
    raise KeyError("train")

entry = Entry(shape=(2, 2, 1), mean=(0.5,), std=(0.5,), read=read, classes=3)
broken_entry = Entry(shape=(2, 2, 1), mean=(0.5,), std=(0.5,), read=read_wrongly, classes=3)
'''
POINTS = """[fedbilevel.datasets]
clouds = clouds_of_mine:load
noise = clouds_of_mine:entry
broken = clouds_of_mine:broken_entry
raises = clouds_of_mine:raises
number = clouds_of_mine:number
absent = clouds_of_mine:absent
"""
Command = Callable[..., tuple[int, str, str]]
OWN = {"data.name": "python", "data.function": "clouds_of_mine:load", "data.clients": 6}


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The module of a user in the working folder; what it puts into `sys` is taken out again."""
    path = tmp_path / "clouds_of_mine.py"
    path.write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield path
    for name in ("clouds_of_mine", "changed"):
        sys.modules.pop(name, None)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package that adds data sets."""
    info = tmp_path / "clouds-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: clouds\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def own(function: str = "clouds_of_mine:load", **more: Any) -> DataSettings:
    return DataSettings(name="python", function=function, **({"clients": 6} | more))


def refused(settings: DataSettings) -> str:
    with pytest.raises(SettingsError) as caught:
        settings.load(0)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# By a function ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", data.KINDS)
def test_a_function_is_split_like_a_built_in_data_set(kind: str) -> None:
    dataset, clients = own(partition=kind, rows_per_client=20).load(0)
    assert (dataset.name, dataset.classes, dataset.shape) == ("clouds", 3, (1, 1, 4))
    assert np.asarray(dataset.train_inputs).dtype == np.asarray(dataset.test_inputs).dtype == np.float32
    assert dataset.train_targets.dtype == dataset.test_targets.dtype == np.int32
    assert clients.count == 6
    for client in range(6):
        for part, rows in zip(clients.load(client).parts.values(), clients.size(client), strict=True):
            assert part.inputs.shape == (rows, 4) and part.targets.shape == (rows,)


def test_a_function_may_be_an_attribute_of_a_class() -> None:
    assert own("clouds_of_mine:Loader.load").dataset.name == "of a class"


def test_a_function_is_called_once() -> None:
    settings = own()
    assert settings.classes == 3
    settings.load(0)
    settings.load(1)
    assert len(sys.modules["clouds_of_mine"].calls) == 1


def test_inputs_may_be_rows_that_are_made_when_they_are_taken(tmp_path: Path) -> None:
    (tmp_path / "changed.py").write_text(
        "import numpy as np\n"
        "from clouds_of_mine import load\n"
        "from fedbilevel.data._dataset import NormalRows\n"
        "def make():\n"
        "    rows = NormalRows(np.zeros((120, 2, 2), np.uint8), 255.0, (0.5,), (0.5,))\n"
        "    return load(train_inputs=rows, test_inputs=NormalRows(rows.pixels[:30], 255.0, (0.5,), (0.5,)))\n"
    )
    dataset, clients = own("changed:make").load(0)
    assert isinstance(dataset.test_inputs, np.ndarray) and dataset.test_inputs.shape == (30, 4)
    np.testing.assert_array_equal(clients.load(0).lower.inputs, -1)


def test_the_function_is_part_of_the_spec_and_of_its_digest() -> None:
    spec = load_spec("paper", OWN)
    assert spec.data.function == "clouds_of_mine:load"
    assert load_spec("paper", OWN | {"data.function": "clouds_of_mine:other"}).digest != spec.digest
    assert "function" not in load_spec("paper").to_mapping()["data"]
    assert "clouds_of_mine" not in sys.modules, "a spec is checked without running the code of its user"


def short(more: dict[str, Any]) -> Spec:
    return load_spec(
        "demo",
        {
            "problem.hidden": 4,
            "algorithm.participation": 3,
            "algorithm.lower_steps": 2,
            "algorithm.upper_steps": 1,
            "evaluate.clients": 2,
            "stop.rounds": None,
            "stop.iterations": 2,
        }
        | more,
    )


@pytest.mark.parametrize("attack", [None, "label-flip"])
@pytest.mark.slow
def test_a_run_on_data_of_ones_own(tmp_path: Path, attack: str | None) -> None:
    result = run(short(OWN | {"attack.kind": attack, "attack.share": attack and 0.4}), tmp_path / "run")
    assert [record["iteration"] for record in result.history] == [0, 1, 2]
    assert 0 <= result.history[-1]["test_accuracy"] <= 1
    assert len(sys.modules["clouds_of_mine"].calls) == 1


def test_labels_are_flipped_within_the_classes_of_the_function() -> None:
    spec = short(OWN | {"attack.kind": "label-flip", "attack.share": 0.9})
    task = spec.task()
    flipped = spec.clients(task)
    before, after = (
        np.concatenate([clients.load(i).lower.targets for i in range(6)]) for clients in (task.clients, flipped)
    )
    assert set(np.unique(before + after)) - set(np.unique(2 * before)) <= {2}
    assert (before != after).any() and set(after.tolist()) == {0, 1, 2}


# What is wrong with a function ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "told"),
    [
        ("no_such_module:load", "No module named 'no_such_module'; write module:attribute"),
        ("clouds_of_mine:absent", "has no attribute 'absent'; write module:attribute"),
        ("clouds_of_mine", "write module:attribute"),
        ("", "write module:attribute"),
        ("clouds_of_mine:number", "it is not a function"),
        ("clouds_of_mine:raises", "it raises FileNotFoundError: no file rows.csv; correct it"),
        ("clouds_of_mine:with_argument", "it raises TypeError: with_argument() missing 1 required"),
        ("clouds_of_mine:returns_a_list", "it returns an object of type list; return a fedbilevel.data.Dataset"),
    ],
)
def test_a_function_that_gives_no_data_set(function: str, told: str) -> None:
    text = refused(own(function))
    assert text.startswith(f"data.function = {function!r} is wrong: ") and told in text


@pytest.mark.parametrize("content", ["1 / 0", "def load(:"])
def test_a_module_that_cannot_be_imported(tmp_path: Path, content: str) -> None:
    (tmp_path / "changed.py").write_text(content)
    text = refused(own("changed:load"))
    assert text.startswith("data.function = 'changed:load' is wrong: its module cannot be imported (")
    assert "Error: " in text and "; correct it" in text and "changed.py, line 1" in text


DISAGREEMENTS = {
    "train_targets=np.zeros(7, int)": "train_inputs has 120 rows and train_targets has 7; give one",
    "test_targets=np.zeros(7, int)": "test_inputs has 30 rows and test_targets has 7; give one label",
    "classes=2": "train_targets has the label 2, and classes is 2; use labels from 0 to 1, or change classes",
    "test_targets=np.full(30, -1)": "test_targets has the label -1, and classes is 3",
    "train_targets=np.zeros(120)": "train_targets is an array of shape (120,) and type float64; give",
    "train_targets=np.zeros((120, 3), int)": "train_targets is an array of shape (120, 3) and type int64",
    "train_targets=[0] * 120": "train_targets is of type list; give a NumPy array of whole numbers",
    "classes=0": "classes is 0; give the number of classes, as in 10",
    "classes='3'": "classes is '3'; give the number of classes",
    "classes=True": "classes is True; give the number of classes",
    "shape=(2, 2)": "shape is (2, 2); give height, width and channels, as in (28, 28, 1)",
    "shape=(2, 2, 0)": "shape is (2, 2, 0); give height",
    "shape=(3, 3, 1)": "train_inputs has the shape (120, 4), and the shape of the data set is (3, 3, 1)",
    "test_inputs=np.zeros((30, 5))": "test_inputs has the shape (30, 5), and the shape of the data set is",
    "train_inputs=np.zeros((120, 2, 2))": "train_inputs has the shape (120, 2, 2)",
    "train_inputs=[[0] * 4] * 120": "train_inputs is of type list; give a NumPy array of rows",
    "train_inputs=np.full((120, 4), 'a')": "train_inputs has the type <U1; give numbers, as float32",
    "test_inputs=np.zeros((0, 4))": "test_inputs has no rows; give at least one",
    "train_inputs=jnp.zeros((120, 4))": "train_inputs is of type ArrayImpl and does not give float32 rows",
    "train_inputs=Stubborn()": "train_inputs is of type Stubborn and does not give float32 rows of 4 numbers",
}


@pytest.mark.parametrize(("change", "told"), DISAGREEMENTS.items(), ids=DISAGREEMENTS)
def test_arrays_that_do_not_agree(tmp_path: Path, change: str, told: str) -> None:
    (tmp_path / "changed.py").write_text(
        "import numpy as np, jax.numpy as jnp\n"
        "from clouds_of_mine import load\n"
        "class Stubborn:\n"
        "    shape = (120, 4)\n"
        f"def make():\n    return load({change})\n"
    )
    text = refused(own("changed:make"))
    assert text.startswith(f"data.function = 'changed:make' is wrong: {told}")


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"data.name": "python"},
            "data.function is missing, and data.name is 'python'; set it to",
        ),
        (
            {"data.function": "clouds_of_mine:load"},
            "data.function = 'clouds_of_mine:load' is wrong: data.name is 'mnist'; set data.name to 'python'",
        ),
        ({"data.name": "python", "data.function": 5}, "data.function = 5 is wrong: "),
    ],
)
def test_a_name_and_a_function_that_do_not_go_together(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load_spec("paper", settings)
    assert str(caught.value).startswith(told)


def test_without_a_spec_a_missing_function_is_told_too() -> None:
    assert refused(DataSettings(name="python")).startswith("data.function is missing")


# By an entry point ------------------------------------------------------------------------------------


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("kind", data.KINDS)
@pytest.mark.parametrize(("name", "rows"), [("clouds", 120), ("noise", 30)])
def test_an_entry_point_is_split_like_a_built_in_data_set(name: str, rows: int, kind: str) -> None:
    settings = DataSettings(name=name, clients=5, partition=kind, rows_per_client=20)
    settings.check()
    dataset, clients = settings.load(0)
    assert (len(dataset.train_targets), dataset.classes, settings.classes) == (rows, 3, 3)
    assert clients.count == 5 and clients.load(4).lower.inputs.shape[1:] == (4,)


@pytest.mark.usefixtures("installed")
def test_an_entry_point_is_a_name_like_others() -> None:
    assert {"clouds", "noise", "mnist"} <= set(data.DATASETS)
    assert load_spec("paper", {"data.name": "clouds"}).data.name == "clouds"
    assert data.files_of("clouds") == data.files_of("noise") == {}
    with pytest.raises(SettingsError, match=r"data\.name = 'cloud' is unknown; use one of: .*clouds.*python"):
        load_spec("paper", {"data.name": "cloud"})


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("broken", "its reader raises KeyError: 'train'; correct it"),
        ("raises", "its function raises FileNotFoundError: no file rows.csv; correct it"),
        ("number", "the package that adds it gives an object of type int; its entry point must be an Entry"),
        ("absent", "the package that adds it fails to load clouds_of_mine:absent"),
    ],
)
def test_an_entry_point_that_gives_no_data_set(name: str, told: str) -> None:
    assert refused(DataSettings(name=name)).startswith(f"data.name = {name!r} is wrong: {told}")


@pytest.mark.usefixtures("installed")
@pytest.mark.slow
def test_a_run_on_the_data_of_a_package(tmp_path: Path) -> None:
    result = run(short({"data.name": "noise", "data.clients": 5}), tmp_path / "run")
    assert [record["iteration"] for record in result.history] == [0, 1, 2]


# The command line -------------------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    monkeypatch.setattr(shared.out, "width", 160)  # so that no row of a table is wrapped

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedbilevel", *arguments])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return call


def sets(settings: dict[str, Any]) -> list[str]:
    return [word for key, value in settings.items() for word in ("--set", f"{key}={value}")]


def test_data_show_describes_a_function(command: Command, tmp_path: Path) -> None:
    code, out, err = command("data", "show", *sets(OWN), "--picture", str(tmp_path / "labels.svg"))
    assert (code, err) == (0, "") and "120 rows, 3 classes, 6 clients" in out
    assert "clouds, shards partition" in (tmp_path / "labels.svg").read_text()
    code, out, err = command("data", "show", *sets(OWN | {"data.function": "clouds_of_mine:raises"}))
    assert (code, out) == (2, "") and err.startswith("error: data.function = ") and err.count("\n") == 1


@pytest.mark.usefixtures("installed")
def test_data_list_and_fetch_know_entry_points(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FEDBILEVEL_DATA", str(tmp_path / "cache"))
    code, out, err = command("data", "list")
    assert (code, err) == (0, "")
    rows = {name: next(line for line in out.splitlines() if f" {name} " in line) for name in data.DATASETS}
    assert "120 + 30" in rows["clouds"] and "made by a function" in rows["clouds"]
    assert "30 + 6" in rows["noise"] and "embedded" in rows["noise"]
    for name in ("broken", "raises", "number", "absent"):
        assert "unusable: data.name" in rows[name]
    for name in ("clouds", "noise"):
        code, out, err = command("data", "fetch", name)
        assert (code, err) == (0, "") and "nothing to fetch" in out
    assert not (tmp_path / "cache").exists()


def test_a_function_runs_with_or_digits_too(command: Command, tmp_path: Path) -> None:
    small = OWN | {"problem.hidden": 4, "algorithm.participation": 3, "stop.rounds": 5}
    code, _, err = command("run", "--or-digits", "--out", str(tmp_path / "run"), *sets(small))
    assert code == 0, err
