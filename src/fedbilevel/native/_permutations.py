"""Permutations for many keys at once, as NumPy's generators draw them.

`permute.c` draws them in a fifth of NumPy's time and without Python's lock. It is compiled when the library is
installed from source on a machine with a C compiler. Without it NumPy draws, with the same result.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache

import numpy as np

from .. import rng
from ._library import compiled

Permute = Callable[[np.ndarray, int, int, int, type[np.integer]], np.ndarray]


def permutations(keys: np.ndarray, count: int, rows: int, width: int, number: type[np.integer]) -> np.ndarray:
    """For each key, the first permutations of so many rows that a generator draws there.

    Each is cut to a width, or filled up to it with zeros. Its numbers are of the type that is given.
    """
    return (_compiled() or with_numpy)(keys, count, rows, width, number)


@lru_cache(maxsize=1)
def as_numpy() -> bool:
    """Whether permutations are those of NumPy's generators. If NumPy changes, it is asked for every draw."""
    return _is_right(permutations)


def smallest_type(rows: int) -> type[np.integer]:
    """The type with the fewest bytes, of three, that has numbers for so many rows."""
    return np.uint8 if rows <= 2**8 else np.uint16 if rows <= 2**16 else np.int32


def with_numpy(keys: np.ndarray, count: int, rows: int, width: int, number: type[np.integer]) -> np.ndarray:
    """The permutations by one generator of NumPy, which is set to key after key."""
    start, order = np.empty((count, rows), np.int64), np.empty((count, rows), np.int64)
    start[:] = np.arange(rows)
    made, rekeyed = np.zeros((len(keys), count, width), number), rng.Rekeyed()
    turn, permuted, cut = rekeyed.turn, rekeyed.generator.permuted, order[:, :width]
    for first, second, into in zip(keys[:, 0].tolist(), keys[:, 1].tolist(), made[:, :, :rows], strict=True):
        turn((first, second))
        permuted(start, axis=1, out=order)
        into[:] = cut
    return made


@lru_cache(maxsize=1)
def _compiled() -> Permute | None:
    """The compiled function; None if there is none, or if it does not draw as this NumPy does."""
    function = compiled("permute.so", "fedbilevel_permutations")
    if function is None:
        return None
    whole, short, place = ctypes.c_int64, ctypes.c_int32, ctypes.c_void_p
    function.argtypes, function.restype = [place, whole, whole, short, whole, short, place, place], None

    def permute(keys: np.ndarray, count: int, rows: int, width: int, number: type[np.integer]) -> np.ndarray:
        keys = np.ascontiguousarray(keys, np.uint64)
        made = (np.empty if width <= rows else np.zeros)((len(keys), count, width), number)
        order, size = np.empty(rows, np.int32), made.itemsize
        function(keys.ctypes.data, len(keys), count, rows, width, size, order.ctypes.data, made.ctypes.data)
        return made

    return permute if _is_right(permute) else None


def _is_right(permute: Permute) -> bool:
    """Whether it draws what generators draw one by one."""
    seed, places = 2**40, np.arange(3)
    made = permute(rng.keys(seed, "round", places, "u", 3), 2, 50, 50, np.int32)
    generators = [rng.generator(seed, "round", int(place), "u", 3) for place in places]
    return np.array_equal(made, [[g.permutation(50) for _ in range(2)] for g in generators])
