"""Values that are on all devices already, so that they are not sent there again."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import jax
import numpy as np
from jax import Array
from jax.sharding import NamedSharding

VECTORS = 16  # the most vectors that are remembered
NUMBERS = 1024  # the most single numbers


class Placed:
    """Puts values on all devices, each once.

    A mean comes to the server on one device, but the program that made it has left it on all of them. If the
    server sends it to the clients as it is, the copies that are there are used.
    """

    def __init__(self, everywhere: NamedSharding) -> None:
        self._everywhere = everywhere
        self._vectors: OrderedDict[int, tuple[Any, Array]] = OrderedDict()  # by identity, with the value itself
        self._numbers: dict[tuple[Any, bytes], Array] = {}

    def everywhere(self, value: Any) -> Array:
        """The value on all devices."""
        if isinstance(value, Array):
            known = self._vectors.get(id(value))
            if known is not None:
                self._vectors.move_to_end(id(value))
                return known[1]
            return self._remember(value, jax.device_put(value, self._everywhere))
        host = np.asarray(value)
        if host.nbytes > NUMBERS:  # an array of the host may change, so it is known by its content only
            return jax.device_put(host, self._everywhere)
        key = (host.dtype, host.shape), host.tobytes()
        if key not in self._numbers:
            if len(self._numbers) == NUMBERS:
                self._numbers.clear()
            self._numbers[key] = jax.device_put(host, self._everywhere)
        return self._numbers[key]

    def on_one_device(self, value: Array) -> Array:
        """The first copy of a value that is on all devices. The others are used if it is sent to them again."""
        first = value.addressable_data(0)
        if value.is_fully_replicated:
            self._remember(first, value)
        return first

    def clear(self) -> None:
        """Forget everything."""
        self._vectors.clear()
        self._numbers.clear()

    def _remember(self, value: Array, copies: Array) -> Array:
        self._vectors[id(value)] = value, copies
        if len(self._vectors) > VECTORS:
            self._vectors.popitem(last=False)
        return copies
