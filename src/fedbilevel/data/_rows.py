"""Whether the rows of clients are what a loss can use. They are checked once, where they come in.

Each error is one line that names the client, the part and the field.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path

from ..errors import SettingsError

PyTree = Any
KINDS = {"U": "strings", "S": "strings", "O": "Python objects", "c": "complex numbers", "M": "dates"}
HOLDS = {"f": float(np.finfo(np.float32).max), "i": 2**31 - 1, "u": 2**32 - 1}  # the largest number of 32 bits


def numbers(where: str, value: PyTree) -> PyTree:
    """The value with NumPy arrays in place of anything like them; raises if they are not finite numbers."""

    def one(path: Any, leaf: Any) -> np.ndarray:
        name = f"{where}{keystr(path)}"
        try:
            made = np.asarray(leaf)
        except ValueError:
            raise SettingsError(f"{name}: rows of different lengths; give them one length, or pad them") from None
        _check(name, made)
        return made

    return jax.tree_util.tree_map_with_path(one, value, is_leaf=_like_an_array)


def _like_an_array(value: Any) -> bool:
    """Whether a list stands for an array: it holds numbers or strings, perhaps in further lists."""
    return isinstance(value, list) and all(
        isinstance(leaf, int | float | str | np.generic) for leaf in jax.tree.leaves(value)
    )


def _check(name: str, a: np.ndarray) -> None:
    if a.dtype.kind not in "biuf":
        what = KINDS.get(a.dtype.kind, f"values of type {a.dtype}")
        raise SettingsError(f"{name}: {what}, where numbers are needed; encode them as numbers")
    if a.ndim == 0:
        raise SettingsError(f"{name}: a single number, where rows are needed; give an array of rows")
    if a.dtype.kind == "b" or a.size == 0:
        return
    if a.dtype.kind == "f":
        rows = np.flatnonzero(~np.isfinite(a).reshape(len(a), -1).all(1))
        if len(rows):
            which = f"row {rows[0]}" if len(rows) == 1 else f"{len(rows):,} rows, the first of which is {rows[0]}"
            raise SettingsError(f"{name}: a number is not finite in {which}; remove such rows, or fill the gaps")
    if a.dtype.itemsize > 4:
        large = max(abs(a.min()), abs(a.max()))
        if large > HOLDS[a.dtype.kind]:
            raise SettingsError(f"{name}: {large:g} is too large for the 32 bits of a number; scale the numbers")


def rows_agree(where: str, part: Any) -> None:
    """Raise unless all arrays of a part, which has inputs and targets, have the same number of rows."""
    found = {f"{name}{keystr(path)}": len(a) for name, path, a in _leaves(part)}
    if not found:
        raise SettingsError(f"{where}: there are no data; give inputs, or inputs and targets")
    (first, rows), *others = found.items()
    for name, count in others:
        if count != rows:
            raise SettingsError(
                f"{where}: {first} has {rows} rows and {name} has {count}; give both the same number of rows"
            )


def shapes_agree(where: str, part: Any, first: Any) -> None:
    """Raise unless the rows of a part have the fields and shapes of those of client 0."""
    own, other = ({f"{n}{keystr(p)}": a.shape[1:] for n, p, a in _leaves(each)} for each in (part, first))
    if own.keys() != other.keys():
        raise SettingsError(
            f"{where} has {', '.join(own)}, and that of client 0 has {', '.join(other)}; give all clients the same"
        )
    for name, shape in own.items():
        if shape != other[name]:
            raise SettingsError(
                f"{where} {name}: rows of shape {shape}, and those of client 0 have {other[name]}; "
                "give all clients the same shape"
            )


def _leaves(part: Any) -> list[tuple[str, Any, Any]]:
    fields = ((name, tree_flatten_with_path(getattr(part, name))[0]) for name in ("inputs", "targets"))
    return [(name, path, a) for name, leaves in fields for path, a in leaves]
