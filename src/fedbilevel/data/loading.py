"""Loading a data set: from its name to arrays."""

from __future__ import annotations

import numpy as np

from .cache import contents
from .catalogue import find
from .dataset import Dataset, NormalRows


def load(name: str, *, offline: bool = False) -> Dataset:
    """Load a data set from the cache. What is not there is fetched first, unless `offline`."""
    entry = find(name)
    tables, scale = entry.read(contents(name, entry, offline=offline)), (entry.white, entry.mean, entry.std)
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
