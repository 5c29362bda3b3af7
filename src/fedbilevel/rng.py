"""Randomness with an address.

Every random choice is drawn from a generator that is made, at the moment of the draw, from an address
such as (seed, "round", 12, "zeta", client). No generator is carried along. What is drawn therefore does not
depend on the engine, on the order in which clients are served, or on whether the run was resumed.

An address begins with its root. The seed of a run is a root that anyone may know. A private run has a secret root
of 32 bytes, because its cohorts must not be guessed. A remote client is given neither: it gets the keys of the
draws of one call, which tell nothing about a secret root.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple
from zlib import crc32

import numpy as np

KEY_SIZE = 16  # bytes of a key of Philox


class Kind(Enum):
    """The purpose of a call to clients. The value is the word that enters the addresses of its draws."""

    ROUND = "round"  # a communication round of the algorithm
    PROBE = "probe"  # a measurement, which the algorithm never sees
    LOCAL = "local"  # local work of the clients, without a message


@dataclass(frozen=True)
class Keys:
    """The keys of one client's draws in one call, by the argument that is drawn."""

    by_argument: Mapping[str, bytes]


Root = int | bytes
Word = int | str


class Address(NamedTuple):
    """The address of the draws of one call. `place` is the number of earlier calls of this kind."""

    root: Root | Keys
    kind: Kind
    place: int

    def generator(self, argument: str, *client: int) -> np.random.Generator:
        """The generator of the rows that a client draws for an argument, or of a choice of the server."""
        if isinstance(self.root, Keys):
            return _keyed(self.root.by_argument[argument])
        return generator(self.root, self.kind.value, self.place, argument, *client)

    def at(self, place: int | None) -> Address:
        """The same address at the place of another call; None is the place of this one."""
        return self if place is None else self._replace(place=place)

    def key(self, argument: str, client: int) -> bytes:
        """The key of a client's draw for an argument."""
        if isinstance(self.root, Keys):
            return self.root.by_argument[argument]
        return key(self.root, self.kind.value, self.place, argument, client)

    def __str__(self) -> str:
        return f"{self.kind.value} {self.place}"


def generator(root: Root, *address: Word) -> np.random.Generator:
    """The generator at an address."""
    if isinstance(root, bytes):
        return _keyed(key(root, *address))
    return np.random.Generator(np.random.Philox(_sequence(root, address)))


def key(root: Root, *address: Word) -> bytes:
    """The bytes from which Philox makes the generator at an address.

    With a secret root they are a keyed digest, so that keys which are known tell nothing about any other key.
    """
    if isinstance(root, bytes):
        return hmac.digest(root, repr([_plain(word) for word in address]).encode(), "sha256")[:KEY_SIZE]
    return _sequence(root, address).generate_state(2, np.uint64).astype("<u8").tobytes()


def _sequence(seed: int, address: Iterable[Word]) -> np.random.SeedSequence:
    """The words of an address. Text enters by its CRC-32, so the address is stable across processes."""
    return np.random.SeedSequence([seed, *(crc32(a.encode()) if isinstance(a, str) else int(a) for a in address)])


def keys(root: int, *words: Word | np.ndarray) -> np.ndarray:
    """The keys of Philox at many addresses: a row of two words for each. A word may be an array of numbers.

    This is NumPy's `SeedSequence`, whose algorithm is fixed, for all addresses at once.
    """
    seed, rest = list[int](), root
    while not seed or rest:
        seed.append(rest & _MASK)
        rest >>= 32
    coded = [crc32(word.encode()) if isinstance(word, str) else word for word in words]
    shape = np.broadcast_shapes(*map(np.shape, coded))
    # An array is as large as the words before it need, and single numbers are arrays, as those may not overflow.
    entropy = [np.atleast_1d(np.asarray(word, np.uint32)) for word in (*seed, *coded)]
    mixed, constant = list[np.ndarray](), _Constant(0x43B0D7E5, 0x931E8875)
    for i in range(4):
        mixed.append(constant.hashed(entropy[i] if i < len(entropy) else np.zeros(1, np.uint32)))
    for source in range(4):
        for to in range(4):
            if source != to:
                mixed[to] = _mix(mixed[to], constant.hashed(mixed[source]))
    for word in entropy[4:]:
        for to in range(4):
            mixed[to] = _mix(mixed[to], constant.hashed(word))
    constant = _Constant(0x8B51F9DD, 0x58F38DED)
    low, high, low_2, high_2 = (constant.hashed(word).astype(np.uint64) for word in mixed)
    made = np.stack([low | high << np.uint64(32), low_2 | high_2 << np.uint64(32)], axis=-1)
    return made.reshape(*shape, 2)


_MASK = 0xFFFFFFFF


class _Constant:
    """The constant of SeedSequence's hash, which changes with every use."""

    def __init__(self, start: int, factor: int) -> None:
        self._value, self._factor = start, factor

    def hashed(self, word: np.ndarray) -> np.ndarray:
        word = word ^ np.uint32(self._value)
        self._value = self._value * self._factor & _MASK
        word = word * np.uint32(self._value)
        return word ^ word >> np.uint32(16)


def _mix(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed: np.ndarray = np.uint32(0xCA01F9DD) * one - np.uint32(0x4973F715) * other
    return mixed ^ mixed >> np.uint32(16)


class Rekeyed:
    """One generator that is set to the start of any key, which is faster than to make a generator for each key."""

    def __init__(self) -> None:
        self._bits = np.random.Philox(0)
        known: Any = self._bits.state  # before the first draw
        self._inner = {"counter": (0, 0, 0, 0), "key": (0, 0)}
        self._state: Any = {**known, "state": self._inner, "buffer": (0, 0, 0, 0)}
        self.generator = np.random.Generator(self._bits)

    def turn(self, key: tuple[int, int]) -> None:
        """Set the generator to the start of a key."""
        self._inner["key"] = key
        self._bits.state = self._state


def _plain(word: Word) -> Word:
    return word if isinstance(word, str) else int(word)


def _keyed(key: bytes) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.frombuffer(key, "<u8").astype(np.uint64)))
