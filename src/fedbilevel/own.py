"""Upper variables that belong to a client: each client has its own, moves them itself, and never sends them.

    Problem(x=..., y=..., own={"temperature": jnp.zeros(()), "weights": PerRow("lower")}, lower=..., upper=...)

An array is the same number of variables for every client. `PerRow` has one for each of the client's rows, however
many these are. The losses read them as `batch.own`, in the user's structure, and `batch.own["weights"][batch.ids]`
are those of the rows of a minibatch. Outside of the losses they are one flat vector w for each client, as x and y
are, padded like the client's rows.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, get_args

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .data import Clients, ClientSize
from .errors import SettingsError
from .steps import PartName

PyTree = Any

KEPT = "own variables"  # what a client keeps them under; no field of a reply can have a name with a space


@dataclass(frozen=True)
class PerRow:
    """A variable for each row of a client's part.

    part    "lower" or "upper"
    start   the initial value of each: a number, or an array for several variables a row
    """

    part: PartName
    start: Any = 0.0

    def __post_init__(self) -> None:
        if self.part not in get_args(PartName):
            raise SettingsError(f"PerRow has part = {self.part!r}; use 'lower' or 'upper'")


class OwnPart:
    """The own variables of a problem: their initial values, their flat vector and the user's structure."""

    def __init__(self, tree: PyTree) -> None:
        variables, rest = eqx.partition(tree, _is_variable)
        self._leaves, structure = jax.tree.flatten(variables)
        if not self._leaves:
            raise SettingsError(
                f"own has no variable, but is of type {type(tree).__name__}; give jnp arrays, or PerRow('lower')"
            )
        self._starts = [
            np.asarray(leaf.start if isinstance(leaf, PerRow) else leaf, np.float32) for leaf in self._leaves
        ]
        if not all(np.isfinite(start).all() for start in self._starts):
            raise SettingsError("own has a number that is not finite; start from finite variables")
        self._tree: Callable[[Any], PyTree] = lambda leaves: eqx.combine(
            jax.tree.unflatten(structure, leaves), rest
        )

    def __str__(self) -> str:
        each = (
            f"{leaf.part} rows of {list(start.shape)}" if isinstance(leaf, PerRow) else str(list(start.shape))
            for leaf, start in zip(self._leaves, self._starts, strict=True)
        )
        return ", ".join(each)

    def size(self, rows: ClientSize) -> int:
        """The number of variables of a client with these numbers of rows."""
        return sum(map(math.prod, self._shapes(rows)))

    def start(self, rows: ClientSize) -> np.ndarray:
        """The initial vector of a client with these numbers of rows."""
        shapes = self._shapes(rows)
        each = (np.broadcast_to(s, shape).ravel() for s, shape in zip(self._starts, shapes, strict=True))
        return np.concatenate(list(each))

    def restore(self, w: Any, rows: ClientSize) -> PyTree:
        """The user's structure of a vector w of a client with these numbers of rows."""
        return self._tree(self._split(w, rows))

    def resized(self, w: Any, rows: ClientSize, to: ClientSize) -> np.ndarray:
        """The vector of a client that is padded to other numbers of rows; further rows have the initial value."""
        wide = self._split(self.start(to), to)
        for out, leaf in zip(wide, self._split(np.asarray(w), rows), strict=True):
            part = tuple(slice(min(a, b)) for a, b in zip(out.shape, leaf.shape, strict=True))
            out[part] = leaf[part]
        return np.concatenate([leaf.ravel() for leaf in wide])

    def kept(self, w: Any, padded: ClientSize, rows: Any) -> tuple[Any, ...]:
        """What a client keeps: its variables, padded, and last the numbers of its rows."""
        return *self._split(w, padded), rows

    def joined(self, kept: tuple[Any, ...]) -> Any:
        """The vector w of what a client has kept."""
        return jnp.concatenate([jnp.ravel(leaf) for leaf in kept[:-1]])

    def unpadded(self, kept: tuple[Any, ...]) -> PyTree:
        """The user's structure of what a client has kept, with its real rows only."""
        *leaves, rows = (np.asarray(leaf) for leaf in kept)
        shapes = self._shapes(ClientSize(*(int(count) for count in rows)))
        return self._tree([leaf[tuple(map(slice, shape))] for leaf, shape in zip(leaves, shapes, strict=True)])

    def _shapes(self, rows: ClientSize) -> list[tuple[int, ...]]:
        return [
            (getattr(rows, leaf.part), *start.shape) if isinstance(leaf, PerRow) else start.shape
            for leaf, start in zip(self._leaves, self._starts, strict=True)
        ]

    def _split(self, w: Any, rows: ClientSize) -> list[Any]:
        shapes = self._shapes(rows)
        ends = list(itertools.accumulate(map(math.prod, shapes), initial=0))
        return [w[a:b].reshape(shape) for (a, b), shape in zip(itertools.pairwise(ends), shapes, strict=True)]


def own_part(problem: Any) -> OwnPart | None:
    """The own variables of a problem, or None if clients have none, or the problem does not know of them."""
    part: OwnPart | None = getattr(problem, "own_part", None)
    return part


class OwnVariables(Mapping[int, PyTree]):
    """The own variables of every client, in the user's structure. They are restored when they are asked for.

    kept   gives what a client has kept, or None for a client that has kept nothing: it has its initial values
    """

    def __init__(self, part: OwnPart, clients: Clients, kept: Callable[[int], tuple[Any, ...] | None]) -> None:
        self._part, self._clients, self._kept = part, clients, kept

    def __getitem__(self, client: int) -> PyTree:
        if not 0 <= client < len(self):
            raise KeyError(client)
        kept = self._kept(client)
        if kept is not None:
            return self._part.unpadded(kept)
        rows = self._clients.size(client)
        return self._part.restore(self._part.start(rows), rows)

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))

    def __len__(self) -> int:
        return self._clients.count


def _is_variable(leaf: Any) -> bool:
    return isinstance(leaf, PerRow | float) or eqx.is_inexact_array_like(leaf)
