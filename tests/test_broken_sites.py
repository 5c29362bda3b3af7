"""A site's TOML and its rows when they are broken: the error is one line that names the field and its value."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from commands import Command, one_line
from fedbilevel.data import ClientData, Part
from fedbilevel.federate.sitefile import write_rows

PROBLEM = '[problem]\nname = "hyper-representation"\nhidden = 3\nshape = [2, 1, 1]\nclasses = 2\n'
ROWS = ClientData(
    Part(np.zeros((4, 2), np.float32), np.zeros(4, np.int32)),
    Part(np.zeros((1, 2), np.float32), np.zeros(1, np.int32)),
)


def whole() -> bytes:
    made = io.BytesIO()
    names = ("lower.inputs", "lower.targets", "upper.inputs", "upper.targets")
    arrays = dict(zip(names, (array for part in ROWS.parts.values() for array in part), strict=True))
    np.savez(made, **arrays)
    return made.getvalue()


def truncated() -> bytes:
    return whole()[: len(whole()) // 2]


def wrong_crc() -> bytes:
    content = bytearray(whole())
    content[content.index(b"\x93NUMPY") + 150] ^= 1  # inside of the first array
    return bytes(content)


def objects() -> bytes:
    made = io.BytesIO()
    np.savez(made, **{"lower.inputs": np.asarray([{}, []], object)}, allow_pickle=True)
    return made.getvalue()


def one_array() -> bytes:
    made = io.BytesIO()
    np.save(made, np.zeros(3))
    return made.getvalue()


def text_in_zip() -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as file:
        for name in ("lower.inputs", "upper.inputs"):
            file.writestr(name, "not an array")
    return made.getvalue()


def enormous() -> bytes:
    """Its header claims an array of a petabyte."""
    made = io.BytesIO()
    head = b"{'descr': '<f8', 'fortran_order': False, 'shape': (140737488355328,), }".ljust(117) + b"\n"
    npy = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head
    with zipfile.ZipFile(made, "w") as file:
        for name in ("lower.inputs.npy", "upper.inputs.npy"):
            file.writestr(name, npy)
    return made.getvalue()


def arrays(**change: np.ndarray | np.generic) -> Callable[[], bytes]:
    def make() -> bytes:
        made, given = io.BytesIO(), {"lower_inputs": ROWS.lower.inputs, "upper_inputs": ROWS.upper.inputs} | change
        np.savez(made, **{name.replace("_", "."): array for name, array in given.items()})
        return made.getvalue()

    make.__name__ = "_".join(change)
    return make


BAD: dict[str, Callable[[], bytes]] = {
    "truncated": truncated,
    "a wrong CRC": wrong_crc,
    "pickled objects": objects,
    "one array": one_array,
    "text": lambda: b"a,b\n1,2\n",
    "nothing": lambda: b"",
    "text in a zip file": text_in_zip,
    "a header of a petabyte": enormous,
    "a number": arrays(lower_inputs=np.float32(3)),
    "a number of targets": arrays(lower_targets=np.int32(3)),
    "words": arrays(lower_inputs=np.asarray(["a", "b"])),
    "complex numbers": arrays(lower_inputs=np.zeros((4, 2), complex)),
    "dates": arrays(lower_inputs=np.zeros(4, "datetime64[s]")),
    "records": arrays(lower_inputs=np.zeros(4, [("a", "f4"), ("b", "f4")])),
    "no rows": arrays(lower_inputs=np.zeros((0, 2), np.float32)),
}


@pytest.mark.parametrize("content", BAD.values(), ids=BAD)
def test_a_file_of_rows_that_is_none_is_named(
    command: Command, tmp_path: Path, content: Callable[[], bytes]
) -> None:
    (tmp_path / "rows.npz").write_bytes(content())
    (tmp_path / "site.toml").write_text(f'[data]\nnpz = "rows.npz"\n{PROBLEM}')
    outcome = command("site", tmp_path / "site.toml")
    one_line(outcome, 2, "data.npz = 'rows.npz' is wrong: ")
    assert len(outcome.err) < 1000


@pytest.mark.parametrize("content", [b"", b"text", b"\x93NUMPY\x01\x00", b"\x93NUMPY\x09\x00aaaa"])
def test_a_folder_of_arrays_that_are_none_is_named(command: Command, tmp_path: Path, content: bytes) -> None:
    (tmp_path / "rows").mkdir()
    (tmp_path / "rows" / "lower.inputs.npy").write_bytes(content)
    (tmp_path / "site.toml").write_text(f'[data]\nfolder = "rows"\n{PROBLEM}')
    one_line(command("site", tmp_path / "site.toml"), 2, "data.folder = 'rows' is wrong: ")


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        ("[-2, 1, 1]", "2"),
        ("[0, 1, 1]", "2"),
        ("[2.5, 1, 1]", "2"),
        ("[2, 1]", "2"),
        ("[2, 1, 1, 1]", "2"),
        ('["2", 1, 1]', "2"),
        ("[true, 1, 1]", "2"),
        ("[[2], 1, 1]", "2"),
        ("2", "2"),
        ('"211"', "2"),
        ("{a = 1}", "2"),
        ("[1000000, 1000000, 1000000]", "2"),
        ("[2, 1, 1]", "-2"),
        ("[2, 1, 1]", "0"),
        ("[2, 1, 1]", "2.5"),
        ("[2, 1, 1]", "true"),
        ("[2, 1, 1]", '"2"'),
        ("[2, 1, 1]", "[2]"),
    ],
)
def test_a_shape_or_a_number_of_classes_that_is_none_is_named(
    command: Command, tmp_path: Path, shape: str, classes: str
) -> None:
    write_rows(tmp_path / "rows.npz", ROWS)
    field = "problem.classes" if shape == "[2, 1, 1]" else "problem.shape"
    problem = f'[problem]\nname = "hyper-representation"\nshape = {shape}\nclasses = {classes}\n'
    (tmp_path / "site.toml").write_text(f'[data]\nnpz = "rows.npz"\n{problem}')
    one_line(command("site", tmp_path / "site.toml"), 2, f"{field} = ", " is wrong: ")


CSV = 'csv = "rows.csv"\ninputs = ["a"]\ntargets = "b"\n'


@pytest.mark.parametrize(
    ("head", "data", "message"),
    [
        ("steps = 5", 'npz = "rows.npz"', "steps = 5 is wrong"),
        ('steps = "abc"', 'npz = "rows.npz"', "steps = 'abc' is wrong"),
        ("steps = [5]", 'npz = "rows.npz"', "steps = 5 is wrong"),
        ("audit = 5", 'npz = "rows.npz"', "audit = 5 is wrong"),
        ('audit = "a\\u0000b"', 'npz = "rows.npz"', "audit = 'a\\x00b' is wrong"),
        ("", "npz = 5", "data.npz = 5 is wrong"),
        ("", 'npz = ["rows.npz"]', "data.npz = ['rows.npz'] is wrong"),
        ("", 'npz = "a\\u0000b"', "data.npz = 'a\\x00b' is wrong"),
        ("", f'npz = "{"x" * 5000}"', "data.npz = 'xxx"),
        ("", f'folder = "{"x" * 5000}"', "data.folder = 'xxx"),
        ("", "python = 5", "data.python = 5 is wrong"),
        ("", f"{CSV}upper_share = 2.0", "data.csv = 'rows.csv' is wrong: upper_share = 2.0"),
        ("", f"{CSV}upper_share = nan", "data.csv = 'rows.csv' is wrong: upper_share = nan"),
        ("", f'{CSV}upper_share = "x"', "data.csv = 'rows.csv' is wrong: upper_share = 'x'"),
        ("", CSV.replace('["a"]', "5"), "data.csv = 'rows.csv' is wrong: inputs = 5"),
        ("", CSV.replace('["a"]', "[5]"), "data.csv = 'rows.csv' is wrong: inputs = [5]"),
        ("", CSV.replace('"b"', "5"), "data.csv = 'rows.csv' is wrong: targets = 5"),
        ("", CSV.replace("rows.csv", "words.csv"), "data.csv = 'words.csv' is wrong"),
        ("", CSV.replace("rows.csv", "short.csv"), "data.csv = 'short.csv' is wrong"),
        ("", CSV.replace("rows.csv", "long.csv"), "data.csv = 'long.csv' is wrong"),
    ],
)
def test_a_value_of_another_type_is_named(
    command: Command, tmp_path: Path, head: str, data: str, message: str
) -> None:
    write_rows(tmp_path / "rows.npz", ROWS)
    (tmp_path / "rows.csv").write_text("a,b\n1,2\n3,4\n5,6\n")
    (tmp_path / "words.csv").write_text("a,b\n1,x\n3,4\n")
    (tmp_path / "short.csv").write_text("a,b\n1\n3,4\n")
    (tmp_path / "long.csv").write_text(f"a,b\n{'1' * 200_000},2\n3,4\n")
    (tmp_path / "site.toml").write_text(f"{head}\n[data]\n{data}\n{PROBLEM}")
    outcome = command("site", tmp_path / "site.toml")
    one_line(outcome, 2, message)
    assert len(outcome.err) < 6000
