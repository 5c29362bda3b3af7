"""A site that stops in the middle of a round when it is told to, so that it can be killed there.

Its TOML has `python = "held_site:make"` in the place of the problem's name, and a folder, `place`. A file `hold`
there names a kind of round. When the site is to begin its work in such a round, it writes its pid and the round to
the file `held`, and waits.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedbilevel import HyperRepresentation, Loop, Problem
from fedbilevel.engines import Call, Replies

KINDS = ("gradient", "lower", "hessian", "hypergradient", "upper")


def kind_of(call: Call) -> str:
    """The kind of a round of FBO-AggITD: `gradients` serves for the gradients and for the Hessian's product."""
    if call.step.name == "gradients":
        return "hessian" if "z" in call.arrays else "gradient"
    return call.step.name.removesuffix("_steps")


def make(place: str, shape: list[int], classes: int, **settings: Any) -> Problem:
    """The problem of the spec; from now on the loop of this process stops where it is told to."""
    replies, folder = Loop.replies, Path(place)

    def held(self: Loop, call: Call) -> Iterator[Replies]:
        order = folder / "hold"
        if order.exists() and order.read_text() == kind_of(call):
            order.unlink()
            (folder / "held.tmp").write_text(
                json.dumps({"pid": os.getpid(), "round": [call.kind.value, call.address.place]})
            )
            (folder / "held.tmp").rename(folder / "held")
            time.sleep(600)
        yield from replies(self, call)

    Loop.replies = held  # type: ignore[method-assign]
    height, width, channels = shape
    return HyperRepresentation(**settings).remote((height, width, channels), classes)
