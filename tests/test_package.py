"""The package: what a wheel and a source archive hold, and what they say of themselves."""

from __future__ import annotations

import email
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import fedbilevel

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "fedbilevel"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the source archive, and with the wheel that was built from the unpacked archive."""
    folder = tmp_path_factory.mktemp("dist")
    build = [sys.executable, "-m", "hatchling", "build", "--directory", str(folder)]
    subprocess.run([*build, "--target", "sdist"], cwd=ROOT, check=True, capture_output=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    inside = next(path for path in folder.iterdir() if path.is_dir())
    subprocess.run([*build, "--target", "wheel"], cwd=inside, check=True, capture_output=True)
    return folder


def wheel(built: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(next(built.glob("*.whl")))


def test_a_wheel_made_from_the_source_archive_has_every_file_of_the_package_and_no_other(built: Path) -> None:
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "."],
        cwd=PACKAGE,
        capture_output=True,
        text=True,
        check=True,
    )
    ours = {f"fedbilevel/{name}" for name in tracked.stdout.split() if (PACKAGE / name).exists()}
    with wheel(built) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    compiled = {name.removesuffix(".c") + ".so" for name in ours if name.endswith(".c")}
    assert len(compiled) == 2
    if shutil.which("cc") is None:
        compiled = set()
    assert names == ours | compiled
    anywhere = next(built.glob("*.whl")).name.endswith("-py3-none-any.whl")
    assert anywhere is not bool(compiled), "what was compiled is for machines of this kind"
    assert {"fedbilevel/py.typed", "fedbilevel/specs/demo.toml", "fedbilevel/templates/problem.py-tpl"} <= names


def test_the_metadata_has_one_version_the_licence_and_what_an_index_shows(built: Path) -> None:
    with wheel(built) as archive:
        named = next(name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(named))
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    assert metadata["Version"] == fedbilevel.__version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.11"
    assert metadata["Author"] and metadata["Keywords"] and metadata["Description-Content-Type"] == "text/markdown"
    classifiers = metadata.get_all("Classifier") or []
    assert {f"Programming Language :: Python :: 3.{minor}" for minor in (11, 12, 13)} <= set(classifiers)
    needed = [line for line in metadata.get_all("Requires-Dist") or [] if "extra ==" not in line]
    heavy = ("ray", "nvflare", "torch", "pytest", "mlflow", "wandb")
    assert not [line for line in needed if line.startswith(heavy)], "the base installation has no tools"


def test_the_source_archive_has_tests_and_documents_but_no_kept_runs(built: Path) -> None:
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    assert {"Makefile", "tests/test_package.py", "docs/architecture.md", "requirements/base.txt"} <= set(names)
    assert not [name for name in names if name.startswith("docs/results/kept") or "__pycache__" in name]
