"""Rows from PyTorch: tensors, Datasets, Subsets and DataLoaders, read whole into NumPy arrays.

PyTorch is never imported here: a value can be one of its objects only if somebody has imported it already.
"""

from __future__ import annotations

import sys
from typing import Any

import jax
import numpy as np

from ..errors import SettingsError


def rows_of_torch(value: Any, where: str) -> Any:
    """The rows of a data set of PyTorch as arrays; any other value as it is, with arrays in place of tensors."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "utils"):
        return value
    data = torch.utils.data
    if isinstance(value, data.DataLoader):
        value = _loaded(value, data, where)
    elif isinstance(value, data.Dataset):
        value = _read(value, data, data.default_collate, where)
    if isinstance(value, list) and any(isinstance(each, torch.Tensor) for each in value):
        value = tuple(value)  # what collate makes of a row of several fields

    def plain(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.dtype in (torch.bfloat16, torch.float16):
            raise SettingsError(
                f"{where}: a tensor of {leaf.dtype}, which NumPy does not have; call .float() on it"
            )
        return leaf.detach().cpu().numpy()

    return jax.tree.map(plain, value)


def _loaded(loader: Any, data: Any, where: str) -> Any:
    """The rows of a DataLoader in the order of its data set, put together by its own function."""
    if loader.dataset is not None and isinstance(loader.dataset, data.IterableDataset):
        return _read(loader.dataset, data, None, where)
    if not isinstance(loader.sampler, data.SequentialSampler | data.RandomSampler):
        raise SettingsError(
            f"{where}: a DataLoader with a {type(loader.sampler).__name__}; give a Subset of the rows instead"
        )
    collate = loader.collate_fn if loader.batch_size is not None else data.default_collate
    return _read(loader.dataset, data, collate, where)


def _read(dataset: Any, data: Any, collate: Any, where: str) -> Any:
    if isinstance(dataset, data.IterableDataset):
        raise SettingsError(
            f"{where}: an IterableDataset, whose rows have no numbers; read it into tensors, or give a Dataset "
            "with __len__ and __getitem__"
        )
    if type(dataset) is data.TensorDataset:
        return tuple(dataset.tensors) if len(dataset.tensors) > 1 else dataset.tensors[0]
    if not hasattr(dataset, "__len__") or len(dataset) == 0:
        raise SettingsError(f"{where}: a {type(dataset).__name__} without rows; give one that has some")
    once, again = (_leaves(dataset[0]) for _ in range(2))
    if len(once) != len(again) or not all(map(np.array_equal, once, again)):
        raise SettingsError(
            f"{where}: row 0 of the {type(dataset).__name__} differs when it is read again; rows are read once, "
            "so remove the random transform, or give the transformed rows as tensors"
        )
    try:
        made = collate([dataset[i] for i in range(len(dataset))])
    except (TypeError, RuntimeError) as error:
        first = (str(error).splitlines() or [""])[0][:150]
        raise SettingsError(
            f"{where}: the rows of the {type(dataset).__name__} cannot be put together: {first}; give rows of "
            "equal shapes, or a DataLoader with a collate_fn"
        ) from None
    return tuple(made) if isinstance(made, list) else made


def _leaves(row: Any) -> list[Any]:
    return [np.asarray(leaf.float() if hasattr(leaf, "float") else leaf) for leaf in jax.tree.leaves(row)]
