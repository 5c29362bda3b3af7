"""Checkpoints: any state of a run as named arrays, and the one file that holds them.

The file is in the safetensors format. Its arrays are the leaves of the state; its header holds the place in the
run, the ledger, and the SHA-256 of all of it. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import keystr, tree_flatten_with_path
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from .._divergence import Restart
from ..errors import CheckpointError
from ..files import arrays_digest
from ..ledger import Ledger

S = TypeVar("S")
HELD = (  # the types of arrays that safetensors writes from NumPy and reads back as they were
    *("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
    *("float16", "bfloat16", "float32", "float64", "complex64"),
)
NUMBERS: dict[type, str] = {bool: "bool", int: "int64", float: "float64"}  # how Python numbers are stored
RESERVED = "__metadata__"  # the safetensors format keeps its header under this name


class Checkpoint(NamedTuple):
    """The place of a run: the arrays of its state, and everything else that it needs to continue.

    arrays     the leaves of the state, by name (`flatten_state`)
    iteration  the number of outer iterations done
    ledger     the books of the federation as JSON values
    restarts   the times that the run went back from divergence
    clients    the files with the states of clients: the number of a client, and the name of its file
    memory     what rules that remember know of the rounds so far: arrays by step and field
    steps      the values of settings that are "auto", and how they came about
    """

    arrays: Mapping[str, np.ndarray]
    iteration: int
    ledger: dict[str, Any]
    restarts: tuple[Restart, ...] = ()
    clients: Mapping[str, str] = {}
    memory: Mapping[str, Mapping[str, np.ndarray]] = {}
    steps: Mapping[str, Any] = {}


class Seal(NamedTuple):
    """What a checkpoint belongs to: the digest of its plan, and the SHA-256 of the history up to it."""

    plan: str
    history: str


# States as named arrays -------------------------------------------------------------------------------


def flatten_state(state: Any) -> dict[str, np.ndarray]:
    """The leaves of any pytree of arrays and Python numbers, under readable names such as "opt.0.mu.w".

    A name is the path to the leaf. Where two paths read alike, the later one has "~2" at its end, and so on.
    Raises `CheckpointError` for a leaf that a checkpoint cannot hold.
    """
    return {name: _as_array(name, leaf) for name, leaf in _named_leaves(state)}


def restore_state(start: S, arrays: Mapping[str, np.ndarray]) -> S:
    """A state with the structure of `start` and these arrays as its leaves, bit for bit.

    `start` is what the run begins with; its values do not matter. Where it has a Python number, the result has
    a Python number of the same type; everywhere else the result has a JAX array, or a NumPy array if JAX is set
    to hold no numbers of that width. Raises `CheckpointError` if names, shapes or types differ.
    """
    named = dict(_named_leaves(start))
    wanted = {name: _kind(_as_array(name, leaf)) for name, leaf in named.items()}
    found = {name: _kind(array) for name, array in arrays.items()}
    if wanted != found:
        difference = _difference(named, wanted, found)
        raise CheckpointError(
            f"the checkpoint does not fit the state that this run starts from: {difference}; "
            "go on with the settings and the algorithm that wrote it, or delete it to start the run again"
        )
    leaves = [_as_leaf(leaf, arrays[name]) for name, leaf in named.items()]
    restored: S = jax.tree.unflatten(jax.tree.structure(start), leaves)
    return restored


def _named_leaves(state: Any) -> Iterator[tuple[str, Any]]:
    """The leaves of a pytree with names that are unique; the same structure always gives the same names."""
    taken = {RESERVED}
    for path, leaf in tree_flatten_with_path(state)[0]:
        name = plain = keystr(path, simple=True, separator=".") or "state"
        numbers = count(2)
        while name in taken:
            name = f"{plain}~{next(numbers)}"
        taken.add(name)
        yield name, leaf


def _as_array(name: str, leaf: Any) -> np.ndarray:
    if type(leaf) in NUMBERS:
        try:
            return np.asarray(leaf, NUMBERS[type(leaf)])
        except OverflowError:
            raise CheckpointError(
                f"{name} = {leaf} in the state does not fit into the 64 bits that a checkpoint has for a whole "
                "number; keep it as a float or as an array of smaller numbers"
            ) from None
    # A typed PRNG key has a type, but refuses to become a NumPy array: the type is looked at first.
    kind = leaf.dtype if hasattr(leaf, "dtype") else np.asarray(leaf).dtype
    if getattr(kind, "name", "") not in HELD:
        what = f"an array of type {kind}" if hasattr(leaf, "dtype") else f"a {type(leaf).__name__}"
        raise CheckpointError(
            f"{name} in the state is {what}, which a checkpoint cannot hold; use a Python number or an array of "
            f"one of the types {', '.join(HELD)} (for a PRNG key, jax.random.key_data gives one)"
        )
    return np.asarray(leaf)


def _as_leaf(start: Any, array: np.ndarray) -> Any:
    """A saved array as the kind of leaf that the start state has in its place."""
    if type(start) in NUMBERS:
        return array.item()
    # Without jax_enable_x64, JAX would silently round a 64-bit array, which only NumPy can have put there.
    return jnp.asarray(array) if jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype else array


def _kind(array: np.ndarray) -> str:
    return f"{array.dtype.name}{list(array.shape)}"


def _difference(start: Mapping[str, Any], wanted: Mapping[str, str], found: Mapping[str, str]) -> str:
    """In words, how the saved arrays differ from the leaves of the start state."""
    lacking, foreign = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    parts = [f"it has no {', '.join(lacking)}"] if lacking else []
    if foreign:
        parts.append(f"it has {', '.join(foreign)}, which the state does not have")
    for name, leaf in start.items():
        if name in found and found[name] != wanted[name]:
            kind = f"a Python {type(leaf).__name__}" if type(leaf) in NUMBERS else wanted[name]
            parts.append(f"its {name} is {found[name]} where the state has {kind}")
    return "; ".join(parts)


# The file ---------------------------------------------------------------------------------------------


def encode(checkpoint: Checkpoint, seal: Seal) -> bytes:
    """The file of a checkpoint; the inverse is `decode`."""
    header = {
        "spec": seal.plan,
        "iteration": str(checkpoint.iteration),
        "ledger": json.dumps(checkpoint.ledger),
        "restarts": json.dumps(checkpoint.restarts),
        "history": seal.history,
    }
    if checkpoint.clients:
        header["clients"] = json.dumps(dict(checkpoint.clients))
    if checkpoint.steps:
        header["steps"] = json.dumps(dict(checkpoint.steps))
    arrays = {name: _in_order(array) for name, array in checkpoint.arrays.items()}
    places: dict[str, tuple[str, str]] = {}
    for step, fields in checkpoint.memory.items():
        for field, array in fields.items():
            name = f"memory.{step}.{field}"
            while name in arrays:  # the leaves of a state may have any names
                name += "~"
            arrays[name], places[name] = _in_order(array), (step, field)
    if places:
        header["memory"] = json.dumps(places)
    header["sha256"] = arrays_digest(arrays, json.dumps(header, sort_keys=True))
    return bytes(save(arrays, header))


def decode(path: Path) -> tuple[Checkpoint, Seal]:
    """Read the file of a checkpoint.

    Raises `CheckpointError` if it is not as it was written; the caller knows the remedy, and adds it.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            header = dict(file.metadata() or {})
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        written, found = header.pop("sha256"), arrays_digest(arrays, json.dumps(header, sort_keys=True))
        memory: dict[str, dict[str, np.ndarray]] = {}
        for name, (step, field) in json.loads(header.get("memory", "{}")).items():
            memory.setdefault(step, {})[field] = arrays.pop(name)
        checkpoint = Checkpoint(
            arrays,
            iteration=int(header["iteration"]),
            ledger=json.loads(header["ledger"]),
            restarts=tuple(Restart(*each) for each in json.loads(header["restarts"])),
            clients=dict(json.loads(header.get("clients", "{}"))),
            memory=memory,
            steps=dict(json.loads(header.get("steps", "{}"))),
        )
        Ledger.from_mapping(checkpoint.ledger)  # raises unless it is the mapping of a ledger
        seal = Seal(header["spec"], header["history"])
    except (SafetensorError, KeyError, ValueError, TypeError, AttributeError, OSError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read ({error})") from None
    if written != found:
        raise CheckpointError(f"{path} is not as it was written: its SHA-256 differs")
    return checkpoint, seal


def _in_order(array: np.ndarray) -> np.ndarray:
    """The array as safetensors expects it: rows one after the other in memory, in the machine's byte order.

    It would write the memory of any other array as it lies there, and so other numbers.
    """
    return np.asarray(array, array.dtype.newbyteorder("="), order="C")
