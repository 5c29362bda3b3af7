"""Several processes that do one run: how they join, and how they agree.

All processes run the same program, each on its own devices (`jax.distributed`). All of them repeat the arithmetic
of the server and get the same result. Values that may differ between processes, such as clocks and files, are
taken from the first process.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental.multihost_utils import broadcast_one_to_all

from .errors import FedBilevelError, RunFolderError, SettingsError

T = TypeVar("T")
LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def join() -> None:
    """Make this process one of several. Call it before anything uses a device.

    The process reads JAX_COORDINATOR_ADDRESS (host:port of the first process), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID. Values that are not set are taken from the cluster (Slurm, Open MPI, Kubernetes or TPU), if
    there is one.
    """
    address = os.environ.get("JAX_COORDINATOR_ADDRESS")
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bind is None and address is not None and address.rpartition(":")[0] in LOOPBACK:
        bind = address  # JAX would listen on every interface
    try:
        jax.distributed.initialize(
            address, _number("JAX_NUM_PROCESSES"), _number("JAX_PROCESS_ID"), coordinator_bind_address=bind
        )
    except (ValueError, RuntimeError) as error:
        raise SettingsError(
            f"--distributed: {error} Set JAX_COORDINATOR_ADDRESS=host:port, JAX_NUM_PROCESSES and JAX_PROCESS_ID "
            "for every process, or start them by Slurm, Open MPI or Kubernetes"
        ) from None


def is_first() -> bool:
    """Whether this process is the first, which writes files and prints; true if there is only one."""
    return jax.process_index() == 0


def are_several() -> bool:
    """Whether there is more than one process."""
    return jax.process_count() > 1


def from_first(make: Callable[[], T]) -> T:
    """Call `make` on the first process and return its JSON value on all; if it raises, all processes raise."""
    if jax.process_count() == 1:
        return make()
    error, content = None, b""
    if is_first():
        try:
            content = json.dumps({"value": make()}).encode()
        except FedBilevelError as raised:
            error, content = raised, json.dumps({"error": str(raised)}).encode()
    size = int(broadcast_one_to_all(np.int32(len(content))))
    sent = broadcast_one_to_all(np.frombuffer(content.ljust(size), np.uint8))
    if error is not None:
        raise error
    message: dict[str, Any] = json.loads(sent.tobytes())
    if "error" in message:
        raise RunFolderError(f"the first process says: {message['error']}")
    value: T = message["value"]
    return value


def arrays_from_first(tree: T) -> T:
    """The first process' value of a pytree of arrays, whose shapes are the same on all processes."""
    return tree if jax.process_count() == 1 else jax.tree.map(jax.numpy.asarray, broadcast_one_to_all(tree))


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is not None and not text.isdecimal():
        raise SettingsError(f"{name} = {text!r} is wrong: use a whole number")
    return None if text is None else int(text)
