"""Loading a data set: from its name, or the address of a function, to arrays that agree with each other."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import SettingsError
from ..names import locate, users_code
from ._agreement import agreed
from ._cache import contents
from ._catalogue import Entry, find
from ._dataset import Dataset, NormalRows


def load(name: str, *, offline: bool = False) -> Dataset:
    """Load a data set by its name. Files that are not in the cache are fetched first, unless `offline`."""
    found, what = find(name), f"data.name = {name!r}"
    if not isinstance(found, Entry):
        return _made(found, what, "its function")
    files = contents(name, found, offline=offline)
    return _made(lambda: _read(name, found, files), what, "its reader")


def load_function(address: str) -> Dataset:
    """Load the data set that the function at `module:function` returns."""
    return _made(locate(address, "data.function"), f"data.function = {address!r}", "it")


def _read(name: str, entry: Entry, files: Mapping[str, bytes]) -> Dataset:
    tables, scale = entry.read(files), (entry.white, entry.mean, entry.std)
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


def _made(function: Callable[[], Any], what: str, who: str) -> Dataset:
    """Call the function and check that it returns a data set whose arrays agree.

    what   the field of the spec and its value
    who    the name of the function in error messages
    """
    with users_code(f"{what} is wrong: {who} raises "):
        made = function()
    if not isinstance(made, Dataset):
        raise SettingsError(
            f"{what} is wrong: {who} returns an object of type {type(made).__name__}; "
            "return a fedbilevel.data.Dataset"
        )
    try:
        return agreed(made)
    except SettingsError as error:
        raise SettingsError(f"{what} is wrong: {error}") from None
