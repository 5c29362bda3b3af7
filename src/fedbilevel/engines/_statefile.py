"""One state of one client in a file, with a digest of its arrays by which a damaged file is refused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from ..errors import CheckpointError, StorageError
from ..files import arrays_digest, write_whole

State = Mapping[str, tuple[Any, ...]]  # the arrays of each thing that a client keeps, by its name


def write_state(file: Path, state: State, client: int) -> str:
    """Write a state, and return its digest."""
    arrays = {
        f"{name}/{i}": np.asarray(leaf, order="C")  # `ascontiguousarray` would make a number a vector
        for name, leaves in state.items()
        for i, leaf in enumerate(leaves)
    }
    digest = arrays_digest(arrays)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_whole(file, safetensors.numpy.save(arrays, {"sha256": digest}), file.with_suffix(".tmp"))
    except OSError as error:
        raise StorageError(
            f"the state of client {client} could not be written to {file}: {error.strerror}; "
            "earlier files are intact: fix this and continue with --resume"
        ) from None
    return digest


def read_state(file: Path, digest: str | None, client: int) -> tuple[State, str]:
    """Read a state, and return its digest with it. A digest that is known has to be the same."""
    try:
        with safetensors.safe_open(file, framework="numpy") as opened:
            written = (opened.metadata() or {}).get("sha256")
            arrays = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
        found = arrays_digest(arrays)
        if found != written or found != (digest or found):
            raise ValueError("its SHA-256 differs from what was written")
        state: dict[str, list[Any]] = {}
        for key in sorted(arrays, key=lambda k: (k.rpartition("/")[0], int(k.rpartition("/")[2]))):
            state.setdefault(key.rpartition("/")[0], []).append(arrays[key])
    except (OSError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"the state of client {client} in {file} cannot be read ({error}); put it back, or start the run again"
        ) from None
    return {name: tuple(leaves) for name, leaves in state.items()}, found
