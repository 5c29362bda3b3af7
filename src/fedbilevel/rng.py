"""Randomness with an address.

Every random choice is drawn from a generator that is made, at the moment of the draw, from an address
such as (seed, "lower_steps", round, client, "zeta"). No generator is carried along: what is drawn does not
depend on the engine, on the order in which clients are served, or on whether the run was resumed.
"""

from __future__ import annotations

from zlib import crc32

import numpy as np


def generator(seed: int, *address: int | str) -> np.random.Generator:
    """The generator at an address. Words enter by their CRC-32, so the address is stable across processes."""
    words = [seed, *(crc32(a.encode()) if isinstance(a, str) else a for a in address)]
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(words)))
