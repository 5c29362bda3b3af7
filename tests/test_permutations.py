"""Permutations for many keys: the compiled ones, NumPy's, and a compiled file that is missing or wrong."""

from __future__ import annotations

import importlib.util
import shutil
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedbilevel import rng
from fedbilevel.native import _library, _permutations

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """The build hook of this checkout."""
    pytest.importorskip("hatchling")
    found = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where a test may put a compiled file, which is then the one of the library."""
    monkeypatch.setattr(_library, "FOLDER", tmp_path)
    return tmp_path / "permute.so"


def keys(seed: int, count: int) -> np.ndarray:
    return rng.keys(seed, "round", np.arange(count), "zeta", 1)


def found() -> _permutations.Permute | None:
    """The function of the compiled file that is there now."""
    return _permutations._compiled.__wrapped__()


@given(
    seed=st.integers(0, 2**64),
    number=st.integers(0, 4),
    count=st.integers(0, 6),
    rows=st.integers(0, 70),
    width=st.integers(0, 80),
    kind=st.sampled_from([np.uint8, np.uint16, np.int32]),
)
def test_the_compiled_permutations_are_those_of_numpy(
    seed: int, number: int, count: int, rows: int, width: int, kind: type[np.integer]
) -> None:
    compiled = _permutations._compiled()
    if compiled is None:
        assert shutil.which("cc") is None, "there is a compiler, and the installation has compiled nothing"
        pytest.skip("no C compiler")
    asked = keys(seed, number), count, rows, width, kind
    made, expected = compiled(*asked), _permutations.with_numpy(*asked)
    assert made.dtype == expected.dtype == kind
    np.testing.assert_array_equal(made, expected)


def test_a_long_permutation_has_every_row_once_and_is_that_of_the_generator() -> None:
    made = _permutations.permutations(keys(7, 1), 2, 70_000, 70_000, np.int32)
    generator = rng.generator(7, "round", 0, "zeta", 1)
    for one in made[0]:
        np.testing.assert_array_equal(one, generator.permutation(70_000))


def test_without_the_compiled_file_numpy_draws(library: Path) -> None:
    assert found() is None
    library.write_bytes(b"no library")
    assert found() is None


def test_a_file_that_draws_otherwise_is_not_used(
    build: ModuleType, library: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a future NumPy would, or an old file after an update: every mask is one bit too narrow here."""
    if shutil.which("cc") is None:
        pytest.skip("no C compiler")
    right = ROOT / build.NATIVE / "permute.c"
    source = library.with_suffix(".c")
    source.write_text(right.read_text().replace("*next++ & mask", "*next++ & mask >> 1"))
    assert build.compile_file(source, library) == ""
    assert found() is None
    other = library.parent / "right" / library.name  # a process loads a path once
    other.parent.mkdir()
    assert build.compile_file(right, other) == ""
    monkeypatch.setattr(_library, "FOLDER", other.parent)
    assert found() is not None


def test_an_environment_that_builds_without_jax_is_told_what_it_lacks(
    build: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(build, "headers", lambda: [])
    why = build.compile_file(ROOT / build.NATIVE / "softmax.c", tmp_path / "softmax.so")
    assert "no jax" in why and "--no-build-isolation" in why and not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_compiled_is_told_and_leaves_nothing(build: ModuleType, tmp_path: Path) -> None:
    source = tmp_path / "wrong.c"
    source.write_text("this is not C")
    assert build.compile_file(source, tmp_path / "wrong.so") != ""
    assert list(tmp_path.iterdir()) == [source]
