"""A data set for classification, as the rest of the library sees it: rows of inputs and one label for each row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError

Pixels = npt.NDArray[np.uint8]


class Rows(Protocol):
    """A table of inputs: an array, or pixels that become float32 where they are taken."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, rows: Any, /) -> npt.NDArray[np.float32]: ...


@dataclass(frozen=True, eq=False)
class NormalRows:
    """Pixels as they are stored. Rows are normalised when they are taken, so that a start is not delayed.

    `np.asarray` normalises every row.
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
    """A table for classification. Inputs are flat normalised rows laid out as height, width, channel.

    A data set without images has the shape (1, 1, features). `mean` and `std` have one number for each channel and
    tell how the inputs were normalised; nothing is computed from them.
    """

    name: str
    train_inputs: Rows
    train_targets: npt.NDArray[np.int32]
    test_inputs: npt.NDArray[np.float32]
    test_targets: npt.NDArray[np.int32]
    classes: int
    shape: tuple[int, int, int]
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()


HALF = 0.5


def normalised_by_half(dataset: Dataset) -> Dataset:
    """The data set with pixels normalised by (v - 0.5) / 0.5, as many scripts for CIFAR-10 do."""
    rows = dataset.train_inputs
    if not isinstance(rows, NormalRows):
        raise SettingsError(
            "data.normalisation = 'half' is wrong: the inputs of this data set are not pixels; use 'usual'"
        )
    half = (HALF,) * len(rows.mean)
    old = dataset.test_inputs.reshape(len(dataset.test_inputs), -1, len(half))
    pixels = old * np.asarray(rows.std, np.float32) + np.asarray(rows.mean, np.float32)
    test = ((pixels - np.float32(HALF)) / np.float32(HALF)).reshape(dataset.test_inputs.shape)
    return replace(dataset, train_inputs=replace(rows, mean=half, std=half), test_inputs=test, mean=half, std=half)
