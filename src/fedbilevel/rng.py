"""Randomness with an address.

Every random choice is drawn from a generator that is made, at the moment of the draw, from an address
such as (seed, "round", 12, "zeta", client). No generator is carried along. What is drawn therefore does not
depend on the engine, on the order in which clients are served, or on whether the run was resumed.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple
from zlib import crc32

import numpy as np


class Kind(Enum):
    """The purpose of a call to clients. The value is the word that enters the addresses of its draws."""

    ROUND = "round"  # a communication round of the algorithm
    PROBE = "probe"  # a measurement, which the algorithm never sees
    LOCAL = "local"  # local work of the clients, without a message


class Address(NamedTuple):
    """The address of the draws of one call. `place` is the number of earlier calls of this kind."""

    seed: int
    kind: Kind
    place: int

    def generator(self, *more: int | str) -> np.random.Generator:
        """The generator at this address, for a purpose, an argument or a client."""
        return generator(self.seed, self.kind.value, self.place, *more)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.place}"


def generator(seed: int, *address: int | str) -> np.random.Generator:
    """The generator at an address. Words enter by their CRC-32, so the address is stable across processes."""
    words = [seed, *(crc32(a.encode()) if isinstance(a, str) else a for a in address)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
