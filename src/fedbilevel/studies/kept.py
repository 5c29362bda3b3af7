"""Finished runs as one small file each, so that a repository can keep them and a table needs no run again.

A file is `DIGEST.tar.xz`. It holds the spec, the history, the summary and the environment of a run, and no
checkpoint. The same run always gives the same bytes. A run that is taken from its file counts as finished. If more
rounds of it are wanted, it begins anew, because nothing is there to continue from.
"""

from __future__ import annotations

import io
import lzma
import shutil
import tarfile
from collections.abc import Iterable
from pathlib import Path

from ..errors import FedBilevelError, RunFolderError
from ..files import make_folder, results_folder, write_whole
from ..record import RunFolder
from ..spec import Spec, load_spec
from .runner import Runs

PARTS = ("spec.toml", "history.jsonl", "summary.json", "environment.json")  # the spec first, as in a run folder
LARGEST = 2**26  # bytes of one part; the history of 4,000 evaluations has about a million


def keep(runs: Runs, specs: Iterable[Spec], folder: Path) -> None:
    """Write a file for every finished run that has none, or whose file holds a shorter one."""
    results_folder(folder, "--keep")
    for spec in specs:
        path, run = _file(folder, spec), runs.of(spec)
        if runs.share(spec) < 1.0:
            continue
        if not path.exists() or _length(_unpacked(path)["history.jsonl"]) < _length(_part(run, "history.jsonl")):
            write_whole(path, _packed(run), path.with_name(f".{path.name}.tmp"))


def take(runs: Runs, specs: Iterable[Spec], folder: Path) -> None:
    """Put the kept runs of these specs into their run folders, where there is no run yet."""
    for spec in specs:
        path, run = _file(folder, spec), runs.of(spec)
        if not path.exists() or run.path.exists():
            continue
        parts = _unpacked(path)
        make_folder(runs.folder)
        text = runs.folder / f"{spec.digest}.toml"
        text.write_bytes(parts["spec.toml"])
        if _digest(text) != spec.digest:
            raise RunFolderError(f"{path} holds a run of another spec; delete it, and the run is done again")
        make_folder(run.path)
        for name in PARTS:
            run.write(name, parts[name])
        try:
            for read in (run.history, run.summary, run.environment):
                read()
        except FedBilevelError as error:
            shutil.rmtree(run.path)
            raise _refused(path, error) from None


def _file(folder: Path, spec: Spec) -> Path:
    return folder / f"{spec.digest}.tar.xz"


def _part(run: RunFolder, name: str) -> bytes:
    return run.file(name).read_bytes()


def _length(history: bytes) -> int:
    """How many evaluations a history has."""
    return history.count(b"\n")


def _digest(file: Path) -> str | None:
    try:
        return load_spec(str(file)).digest
    except FedBilevelError:
        return None


def _packed(run: RunFolder) -> bytes:
    """The parts of a run as one file, without dates, owners and modes."""
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in PARTS:
            content = _part(run, name)
            head = tarfile.TarInfo(name)
            head.size = len(content)
            tar.addfile(head, io.BytesIO(content))
    return lzma.compress(made.getvalue(), preset=9 | lzma.PRESET_EXTREME)


def _unpacked(path: Path) -> dict[str, bytes]:
    """The parts of a run, by name. No path comes from the file, and no part is larger than `LARGEST`."""
    parts = dict[str, bytes]()
    try:
        with tarfile.open(path, "r:xz") as tar:
            for name in PARTS:
                stream = tar.extractfile(tar.getmember(name))
                content = b"" if stream is None else stream.read(LARGEST + 1)
                if not content or len(content) > LARGEST:
                    raise ValueError(f"its {name} is empty, too large or not a file")
                parts[name] = content
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, lzma.LZMAError) as error:
        raise _refused(path, error) from None
    return parts


def _refused(path: Path, error: Exception) -> RunFolderError:
    return RunFolderError(f"{path} is not a kept run ({error}); delete it, and the run is done again")
