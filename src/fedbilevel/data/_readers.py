"""Readers: from the raw files of a data set to arrays of pixels and labels, one function for each file format."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ._dataset import Pixels

IDX = tuple(f"{part}-{what}-ubyte" for part in ("train", "t10k") for what in ("images-idx3", "labels-idx1"))
CIFAR_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")


class Tables(NamedTuple):
    """What a reader returns: pixels as rows, and labels."""

    train_inputs: Pixels
    train_targets: Pixels
    test_inputs: Pixels
    test_targets: Pixels


def read_idx(files: Mapping[str, bytes]) -> Tables:
    """Read four idx files: two zero bytes, the type (8: bytes), the number of axes, their lengths, the bytes."""

    def table(data: bytes) -> Pixels:
        lengths = np.frombuffer(data, ">u4", count=data[3], offset=4)
        return np.frombuffer(data, np.uint8, offset=4 + 4 * data[3]).reshape(lengths)

    return Tables(*(table(files[name]) for name in IDX))


def read_cifar(files: Mapping[str, bytes]) -> Tables:
    """Read batches of 3073-byte records: the label, then the red, green and blue planes of 32 x 32 pixels."""

    def table(batches: tuple[str, ...]) -> tuple[Pixels, Pixels]:
        records = np.frombuffer(b"".join(files[f"{b}.bin"] for b in batches), np.uint8).reshape(-1, 3073)
        return records[:, 1:].reshape(-1, 3, 1024).transpose(0, 2, 1), records[:, 0]

    return Tables(*table(CIFAR_BATCHES[:-1]), *table(CIFAR_BATCHES[-1:]))


def read_digits(files: Mapping[str, bytes]) -> Tables:
    """Take the digits that scikit-learn contains. Every fifth row of a class, in stored order, is for testing."""
    rows = _digits().astype(np.uint8)
    inputs, targets = rows[:, :-1], rows[:, -1]
    test = np.zeros(len(targets), bool)
    for label in range(10):
        test[np.flatnonzero(targets == label)[4::5]] = True
    return Tables(inputs[~test], targets[~test], inputs[test], targets[test])


def _digits() -> Any:
    """Rows of 64 pixels and a label, from scikit-learn's file, as importing scikit-learn takes half a second."""
    found = find_spec("sklearn")
    for folder in (found and found.submodule_search_locations) or ():
        file = Path(folder) / "datasets" / "data" / "digits.csv.gz"
        if file.exists():
            return np.loadtxt(file, delimiter=",")
    from sklearn.datasets import load_digits  # its files have another place than in the releases that we know

    return np.column_stack(load_digits(return_X_y=True))
