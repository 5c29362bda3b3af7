"""The supply chain: every package that CI installs is one version, known by the SHA-256 of its files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKS = {name: ROOT / "requirements" / f"{name}.txt" for name in ("build", "base", "flare", "dev", "docs")}
PIN = re.compile(r"^([a-z0-9.-]+)(?:\[[a-z,]+\])?==[^ ;]+( ; [^\\]+)?( --hash=sha256:[0-9a-f]{64})+$")


def locked(name: str) -> dict[str, str]:
    """The lines of a lock, without comments, by the name of the package."""
    text = re.sub(r"(?m)^ *#.*\n", "", LOCKS[name].read_text())
    lines = [" ".join(line.split()) for line in text.replace("\\\n", " ").splitlines() if line.strip()]
    return {line.partition("==")[0].partition("[")[0]: line for line in lines}


def asked(requirements: list[str]) -> set[str]:
    return {re.split(r"[\[<>=;# ]", each)[0].lower().replace("_", "-") for each in requirements}


def test_every_line_is_one_version_with_hashes_and_nothing_else() -> None:
    for name in LOCKS:
        lines = locked(name).values()
        assert lines and [line for line in lines if not PIN.match(line)] == [], "no address, no path, no range"
    for name in ("build", "base", "flare"):
        assert locked(name).items() <= locked("dev").items(), "one version and its files in all locks"


def test_the_lock_has_everything_that_the_packages_ask_for_and_what_builds_them() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    example = tomllib.loads((ROOT / "examples" / "momentum" / "pyproject.toml").read_text())
    extras = project["project"]["optional-dependencies"]
    wanted = asked(project["project"]["dependencies"])
    for name in ("dev", "flare", "mlflow", "privacy", "ray", "tensorboard", "wandb"):
        wanted |= asked(extras[name])
    for each in (project, example):
        wanted |= asked(each["build-system"]["requires"])
    lines = (ROOT / "requirements" / "build.in").read_text().splitlines()
    builds = asked([line for line in lines if not line.startswith("#")])
    assert builds <= locked("build").keys()
    assert asked(project["project"]["dependencies"]) <= locked("base").keys()
    assert asked(extras["flare"] + extras["privacy"]) <= locked("flare").keys()
    assert wanted - {"fedbilevel"} <= locked("dev").keys()


def test_what_ci_runs_is_installed_by_its_hashes_only() -> None:
    makefile = (ROOT / "Makefile").read_text()
    recipes = [line for line in makefile.replace("\\\n", " ").splitlines() if line.startswith("\t")]
    installs = [line for line in recipes if "pip install" in line or "call INSTALL" in line]
    hashed = re.compile(r"--require-hashes .*--no-deps .*--requirement requirements/(build|base|dev|docs)\.txt")
    ours = re.compile(r"--no-deps .*--no-index (--editable|dist/fedbilevel-)")  # built here
    torch = re.compile(r"pip install \$\(PIP\) 'torch==[0-9.]+' ")  # in no lock: its builds for Linux bring CUDA
    installs.remove(*filter(torch.search, installs))
    assert len(installs) >= 6 and all(hashed.search(line) or ours.search(line) for line in installs)
    assert "pip check" in makefile, "as nothing is resolved, a package that the lock lacks is found there"
    assert "pip install" not in (ROOT / ".ci" / "run").read_text(), "CI uses the Makefile"


@pytest.mark.slow
def test_another_file_under_the_name_of_a_pinned_version_is_refused(tmp_path: Path) -> None:
    line = locked("dev")["tomli-w"]
    version = line.split()[0].partition("==")[2]
    info = f"tomli_w-{version}.dist-info"
    with zipfile.ZipFile(tmp_path / f"tomli_w-{version}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tomli_w/__init__.py", "print('stolen')\n")
        wheel.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tomli_w\nVersion: {version}\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    (tmp_path / "one.txt").write_text(line + "\n")
    command = [sys.executable, "-m", "pip", "install", "--isolated", "--no-index", "--find-links", str(tmp_path)]
    command += ["--require-hashes", "--target", str(tmp_path / "out"), "-r", str(tmp_path / "one.txt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode != 0 and "DO NOT MATCH THE HASHES" in done.stderr
    assert not list(tmp_path.glob("out/*"))
