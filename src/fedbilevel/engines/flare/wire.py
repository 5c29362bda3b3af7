"""Messages as bytes: a magic word, the length of a header, the header as JSON, and the vectors one after another.

The header says what follows: {"kind": ..., "round": ..., "vectors": [{"name", "dtype", "shape"}, ...], ...}.
A reader checks the whole message before using any part of it. Nothing in a message can be executed.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...steps import Descriptor, Epochs, PerClient, Sample, Samples

MAGIC = b"FBL1"
PREFIX = struct.Struct("<4sI")
HEADER_LIMIT = 2**20
LIMIT = 2**30  # the largest message, in bytes
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int32": np.dtype("<i4"),
    "float64": np.dtype("<f8"),
}
DESCRIPTORS: dict[str, type[Any]] = {"sample": Sample, "samples": Samples, "epochs": Epochs}


class Malformed(ValueError):
    """Bytes that are not a message, or not the one that was expected."""


@dataclass(frozen=True)
class Message:
    """A header and vectors by name."""

    header: Mapping[str, Any]
    vectors: Mapping[str, np.ndarray]

    def get(self, key: str, kind: type[Any]) -> Any:
        """A field of the header, which must be of this type."""
        value = self.header.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) is not (kind is bool):
            raise Malformed(f"the header has no {key} that is a {kind.__name__}")
        return value


def pack(header: Mapping[str, Any], vectors: Mapping[str, Any]) -> bytes:
    """The bytes of a message."""
    arrays = {name: np.asarray(value) for name, value in vectors.items()}
    described = [{"name": n, "dtype": a.dtype.name, "shape": list(a.shape)} for n, a in arrays.items()]
    text = json.dumps({**header, "vectors": described}).encode()
    body = (np.ascontiguousarray(a, DTYPES[a.dtype.name]).tobytes() for a in arrays.values())
    return b"".join([PREFIX.pack(MAGIC, len(text)), text, *body])


def unpack(data: Any, limit: int = LIMIT) -> Message:
    """The message in these bytes; raises `Malformed` with the reason if they are not a valid message."""
    if not isinstance(data, bytes):
        raise Malformed(f"{type(data).__name__} instead of bytes")
    if len(data) > limit:
        raise Malformed(f"{len(data)} bytes, at most {limit} are allowed")
    if len(data) < PREFIX.size:
        raise Malformed(f"{len(data)} bytes are too short for a message")
    magic, length = PREFIX.unpack_from(data)
    if magic != MAGIC:
        raise Malformed("not a message: it does not begin with the magic word")
    if length > HEADER_LIMIT or PREFIX.size + length > len(data):
        raise Malformed(f"a header of {length} bytes does not fit")
    try:
        header = json.loads(data[PREFIX.size : PREFIX.size + length])
    except ValueError as error:
        raise Malformed(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict) or not isinstance(header.get("vectors"), list):
        raise Malformed("the header does not describe its vectors")
    vectors: dict[str, np.ndarray] = {}
    start = PREFIX.size + length
    for entry in header["vectors"]:
        name, dtype, shape = _described(entry)
        if name in vectors:
            raise Malformed(f"vector {name} comes twice")
        size = math.prod(shape) * dtype.itemsize
        if start + size > len(data):
            raise Malformed(f"vector {name} of shape {shape} is cut off")
        vectors[name] = np.frombuffer(data, dtype, math.prod(shape), start).reshape(shape)
        start += size
    if start != len(data):
        raise Malformed(f"{len(data) - start} bytes more than the header describes")
    return Message(header, vectors)


def _described(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    fields = entry if isinstance(entry, dict) else {}
    name, dtype, shape = fields.get("name"), fields.get("dtype"), fields.get("shape")
    if not isinstance(name, str) or dtype not in DTYPES or not isinstance(shape, list) or len(shape) > 4:
        raise Malformed(f"a vector is described as {str(entry)[:80]}")
    if not all(isinstance(n, int) and not isinstance(n, bool) and 0 <= n <= LIMIT for n in shape):
        raise Malformed(f"vector {name} has shape {shape}")
    return name, DTYPES[dtype], tuple(shape)


def descriptor_to_json(descriptor: Descriptor) -> dict[str, Any]:
    """A sample descriptor as JSON; the inverse is `descriptor_from_json`."""
    kind = next(name for name, cls in DESCRIPTORS.items() if type(descriptor) is cls)
    fields = dict(vars(descriptor))
    if isinstance(fields.get("count"), PerClient):
        fields["count"] = [int(n) for n in fields["count"].values]
    return {"kind": kind, **fields}


def descriptor_from_json(value: Any) -> Descriptor:
    fields = dict(value) if isinstance(value, dict) else {}
    cls = DESCRIPTORS.get(str(fields.pop("kind", None)))
    if isinstance(fields.get("count"), list):
        fields["count"] = PerClient(tuple(fields["count"]))
    try:
        made: Descriptor = cls(**fields)  # type: ignore[misc]
    except TypeError:
        raise Malformed(f"a sample is described as {str(value)[:80]}") from None
    if made.part not in ("lower", "upper"):
        raise Malformed(f"a sample is of the part {made.part!r}")
    return made
