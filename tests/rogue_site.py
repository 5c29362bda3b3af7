"""A site that answers wrongly, each round in another way. Its TOML has `python = "rogue_site:make"`.

What it answers goes over the same wire as a good site's, so the test sees what the server makes of it there.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from fedbilevel import HyperRepresentation, Problem
from fedbilevel.engines.flare import Message, Site, pack, unpack


def not_finite(message: Message) -> Any:
    return pack(message.header, {name: v * np.float32(np.nan) for name, v in message.vectors.items()})


def wrong_shape(message: Message) -> Any:
    return pack(message.header, {name: np.append(v, v[:1]) for name, v in message.vectors.items()})


def oversized(message: Message) -> Any:
    return pack(message.header, {name: np.zeros(2**21, np.float32) for name in message.vectors})


def enormous(message: Message) -> Any:
    """More than FLARE receives for this job."""
    return pack(message.header, {name: np.zeros(2**24, np.float32) for name in message.vectors})


def unknown_step(message: Message) -> Any:
    return pack({**message.header, "step": "rogue:step"}, message.vectors)


def garbage(message: Message) -> Any:
    return b"garbage " * 1000


def no_bytes(message: Message) -> Any:
    return {"text": "instead of bytes"}


WAYS = (not_finite, wrong_shape, oversized, enormous, unknown_step, garbage, no_bytes)


def make(place: str, shape: list[int], classes: int, **settings: Any) -> Problem:
    """The problem of the spec; from now on the sites of this process answer wrongly."""
    ways, answer = itertools.cycle(WAYS), Site.answer

    def wrong(self: Site, request: Any, caller: str) -> Any:
        message = unpack(answer(self, request, caller))
        return next(ways)(message) if message.header["kind"] == "reply" else pack(message.header, message.vectors)

    Site.answer = wrong  # type: ignore[method-assign, assignment]
    height, width, channels = shape
    return HyperRepresentation(**settings).remote((height, width, channels), classes)
