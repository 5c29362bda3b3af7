"""Whether the arrays of a data set agree with each other, with its number of classes and with its shape.

The errors name the array, what was found and a remedy. The caller adds the field of the spec and its value.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import SettingsError
from ._dataset import Dataset, Rows


def agreed(made: Dataset) -> Dataset:
    """The data set with float32 inputs and int32 targets, or an error if its arrays do not agree."""
    shape, classes = _shape(made.shape), _classes(made.classes)
    train_inputs = _inputs("train_inputs", made.train_inputs, shape)
    test_inputs = _inputs("test_inputs", made.test_inputs, shape)
    return replace(
        made,
        train_inputs=train_inputs,
        train_targets=_targets("train", made.train_targets, train_inputs.shape[0], classes),
        test_inputs=test_inputs if isinstance(test_inputs, np.ndarray) else _all_rows(test_inputs),
        test_targets=_targets("test", made.test_targets, test_inputs.shape[0], classes),
        classes=classes,
        shape=shape,
    )


def _shape(value: Any) -> tuple[int, int, int]:
    if isinstance(value, tuple) and len(value) == 3 and all(_is_count(length) for length in value):
        height, width, channels = map(int, value)
        return height, width, channels
    raise SettingsError(
        f"shape is {value!r}; give height, width and channels, as in (28, 28, 1), "
        "or (1, 1, features) for rows that are not images"
    )


def _classes(value: Any) -> int:
    if not _is_count(value):
        raise SettingsError(f"classes is {value!r}; give the number of classes, as in 10")
    return int(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool) and int(value) >= 1


def _inputs(name: str, value: Any, shape: tuple[int, int, int]) -> Rows:
    """The inputs as float32. If they are not an array, they stay as they are, and one row is checked."""
    found, width = getattr(value, "shape", None), math.prod(shape)
    if not isinstance(found, tuple):
        raise SettingsError(f"{name} is of type {type(value).__name__}; give a NumPy array of rows")
    if len(found) != 2 or found[1] != width:
        raise SettingsError(
            f"{name} has the shape {found}, and the shape of the data set is {shape}; "
            f"give flat rows of {width} numbers, or change the shape"
        )
    if found[0] == 0:
        raise SettingsError(f"{name} has no rows; give at least one")
    if not isinstance(value, np.ndarray):
        _check_rows_that_are_taken(name, value, width)
        rows: Rows = value
        return rows
    if value.dtype.kind not in "fiub":
        raise SettingsError(f"{name} has the type {value.dtype}; give numbers, as float32")
    return value.astype(np.float32, copy=False)


def _all_rows(inputs: Rows) -> npt.NDArray[np.float32]:
    return inputs[np.arange(inputs.shape[0])]


def _check_rows_that_are_taken(name: str, value: Any, width: int) -> None:
    """Take one row as a client would, since rows that are made when they are taken cannot be seen before."""
    try:
        row = value[np.zeros(1, np.intp)]
    except Exception:  # a table of another library, whose rows are taken in another way
        row = None
    if not isinstance(row, np.ndarray) or row.dtype != np.float32 or row.shape != (1, width):
        raise SettingsError(
            f"{name} is of type {type(value).__name__} and does not give float32 rows of {width} numbers "
            "when it is indexed by row numbers; give a NumPy array"
        )


def _targets(part: str, value: Any, rows: int, classes: int) -> npt.NDArray[np.int32]:
    name = f"{part}_targets"
    if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.kind not in "iub":
        found = (
            f"an array of shape {value.shape} and type {value.dtype}"
            if isinstance(value, np.ndarray)
            else f"of type {type(value).__name__}"
        )
        raise SettingsError(f"{name} is {found}; give a NumPy array of whole numbers, one label for each row")
    if len(value) != rows:
        raise SettingsError(
            f"{part}_inputs has {rows} rows and {name} has {len(value)}; give one label for each row"
        )
    for label in (value.min(), value.max()):
        if not 0 <= label < classes:
            raise SettingsError(
                f"{name} has the label {label}, and classes is {classes}; use labels from 0 to {classes - 1}, "
                "or change classes"
            )
    return value.astype(np.int32, copy=False)
