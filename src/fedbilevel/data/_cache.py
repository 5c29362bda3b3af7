"""The cache of data files: missing files are fetched, and existing files are verified.

A download is verified before it is unpacked (`_origins.py`). Every source ends in the same raw files, known by
their SHA-256. They are made in a temporary folder beside the cache, checked there, and only then renamed into it.
So an interrupted or wrong download is never taken for data, and the data do not depend on which source answered.
Every file is checked each time it is read.
"""

from __future__ import annotations

import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskProgressColumn, TimeElapsedColumn

from ..errors import CorruptData, DataUnavailable, SettingsError, one_line
from ..files import make_folder, write_whole
from ._catalogue import Entry, find
from ._origins import Source, verify


def fetch(name: str, *, force: bool = False) -> Path:
    """Put the files of a data set into the cache if they are not there, or if `force`, and return its folder.

    A data set without files, such as 'digits' or one that a function makes, has nothing to fetch.
    """
    entry, folder = find(name), cache_folder() / name
    if not isinstance(entry, Entry) or not entry.files:
        return folder
    if force or len(_cached(name, entry, folder)) < len(entry.files):
        obtain(name, entry.files, entry.sources, folder)
    return folder


def contents(name: str, entry: Entry, *, offline: bool = False) -> dict[str, bytes]:
    """The contents of every file of a data set; those that are not in the cache are fetched unless `offline`."""
    folder = cache_folder() / name
    found = _cached(name, entry, folder)
    if len(found) == len(entry.files):
        return found
    if offline:
        raise DataUnavailable(
            f"data set {name!r} is not in {folder} and fetching is off (offline); "
            f"run `fedbilevel data fetch {name}`. {remedy(entry.files, folder)}"
        )
    obtain(name, entry.files, entry.sources, folder)
    return _cached(name, entry, folder)


def cache_folder() -> Path:
    """The folder of all data sets: FEDBILEVEL_DATA if it is set, else the user's cache folder."""
    return Path(os.environ.get("FEDBILEVEL_DATA") or user_cache_path("fedbilevel")).expanduser()


def _cached(name: str, entry: Entry, folder: Path) -> dict[str, bytes]:
    """The contents of the files that are in the cache. Each is checked."""
    found = {}
    for file, sha256 in entry.files.items():
        path = folder / file
        try:
            found[file] = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:
            raise CorruptData(f"{path} cannot be read ({error.strerror}); {_again(name)}") from error
        if (actual := digest(found[file])) != sha256:
            raise CorruptData(f"{path} is corrupt: SHA-256 {actual}, not {sha256}; {_again(name)}")
    return found


def _again(name: str) -> str:
    return (
        f"delete the file or run `fedbilevel data fetch {name} --force`, or set FEDBILEVEL_DATA to another folder"
    )


def obtain(name: str, files: Mapping[str, str], sources: Sequence[Source], folder: Path) -> None:
    """Put the files (name to SHA-256) of a data set into `folder`, from the first source that has them."""
    try:
        make_folder(folder)
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
                    verify(made / file, sha256)
                for file in files:
                    write_whole(folder / file, (made / file).read_bytes(), Path(temporary, file))
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
    """The SHA-256 of these bytes, in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def _progress() -> Progress:
    columns = (SpinnerColumn(), "{task.description}", BarColumn(), TaskProgressColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _reason(error: Exception) -> str:
    return one_line(str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}")
