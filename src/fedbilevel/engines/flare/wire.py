"""Messages as bytes: a magic word, the length of a header, the header as JSON, and the vectors one after another.

The header says what follows: {"kind": ..., "round": ..., "vectors": [{"name", "dtype", "shape"}, ...], ...}.
A reader checks the whole message before using any part of it. Nothing in a message can be executed. Whatever the
bytes are, reading them either succeeds or raises `Malformed`. What `Malformed` says is made here, and repeats
nothing of the message but numbers and the names of vectors, which are checked first.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeGuard

import numpy as np

from ...steps import Descriptor, Epochs, PerClient, Sample, Samples

MAGIC = b"FBL1"
PREFIX = struct.Struct("<4sI")
HEADER_LIMIT = 2**20
LIMIT = 2**30  # the largest message, in bytes
VECTORS = 256  # the largest number of vectors in a message
NAME = 100  # the longest name of a vector
DEPTH = 8  # how deeply the lists and objects of a header may be nested
DIGITS = 40  # the longest whole number in a header
SAMPLE = 2**20  # the largest number of rows of one draw
DRAWN = 2**24  # the largest number of rows of all draws of a sample
DTYPES: dict[str, np.dtype[Any]] = {
    "float32": np.dtype("<f4"),
    "int32": np.dtype("<i4"),
    "float64": np.dtype("<f8"),
}
DESCRIPTORS: dict[str, type[Any]] = {"sample": Sample, "samples": Samples, "epochs": Epochs}


class Malformed(ValueError):
    """Bytes that are not a message, or not the one that was expected."""


class Trouble(Enum):
    """Why a site answers a request with an error."""

    REQUEST = "request"  # the request is not valid, or asks for what the site does not have
    REFUSED = "refused"  # the policy or the budget of the site does not allow it
    FAILED = "failed"  # the step raised an exception


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
    """The message in these bytes; raises `Malformed` with the reason if they are not a valid message.

    The header is read and checked before any array is made, and the arrays are views of the bytes.
    """
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
    header = _header(data[PREFIX.size : PREFIX.size + length])
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


def _header(text: bytes) -> dict[str, Any]:
    """The header as JSON values that are safe to handle: shallow, finite, and text that can be encoded."""
    try:
        header = _DECODER.decode(text.decode())
        if b"\\u" in text:  # only an escape can stand for half of a character
            json.dumps(header, ensure_ascii=False).encode()
    except Malformed:
        raise
    except RecursionError:
        raise Malformed("the header is nested too deeply") from None
    except ValueError:
        raise Malformed("the header is not JSON in UTF-8") from None
    _check_depth(header, DEPTH)
    if not isinstance(header, dict) or not isinstance(header.get("vectors"), list):
        raise Malformed("the header does not describe its vectors")
    if len(header["vectors"]) > VECTORS:
        raise Malformed(f"{len(header['vectors'])} vectors, at most {VECTORS} are allowed")
    return header


def _check_depth(value: Any, left: int) -> None:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        if isinstance(each, dict | list):
            if left <= 1:
                raise Malformed("the header is nested too deeply")
            _check_depth(each, left - 1)


def _integer(text: str) -> int:
    if len(text) > DIGITS:
        raise Malformed(f"the header has a whole number of more than {DIGITS} digits")
    return int(text)


def _fraction(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Malformed("the header has a number that is not finite")
    return value


def _constant(text: str) -> Any:
    raise Malformed("the header has a number that is not finite")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise Malformed("the header has a key that comes twice")
    return made


_DECODER = json.JSONDecoder(
    parse_int=_integer, parse_float=_fraction, parse_constant=_constant, object_pairs_hook=_object
)


def _described(entry: Any) -> tuple[str, np.dtype[Any], tuple[int, ...]]:
    fields = entry if isinstance(entry, dict) else {}
    name, dtype, shape = fields.get("name"), fields.get("dtype"), fields.get("shape")
    if not isinstance(name, str) or len(name) > NAME or not name.replace(".", "_").isidentifier():
        raise Malformed("a vector has no name, or one that is not made of words and dots")
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise Malformed(f"vector {name} has no type among {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > 4 or not all(whole(n, 0, LIMIT) for n in shape):
        raise Malformed(f"vector {name} has a shape that is not a list of at most four sizes")
    if math.prod(max(n, 1) for n in shape) > LIMIT:
        raise Malformed(f"vector {name} has a shape that is too large")
    return name, DTYPES[dtype], tuple(shape)


def whole(value: Any, least: int, most: int) -> TypeGuard[int]:
    """Whether a JSON value is a whole number within bounds. True and 1.0 are not."""
    return type(value) is int and least <= value <= most


def descriptor_to_json(descriptor: Descriptor) -> dict[str, Any]:
    """A sample descriptor as JSON; the inverse is `descriptor_from_json`."""
    kind = next(name for name, cls in DESCRIPTORS.items() if type(descriptor) is cls)
    fields = dict(vars(descriptor))
    if isinstance(fields.get("count"), PerClient):
        fields["count"] = [int(n) for n in fields["count"].values]
    return {"kind": kind, **fields}


def descriptor_from_json(value: Any) -> Descriptor:
    """A sample descriptor whose draws are bounded; raises `Malformed` if the value does not describe one."""
    fields = dict(value) if isinstance(value, dict) else {}
    cls = DESCRIPTORS.get(str(fields.pop("kind", None)))
    size, count = fields.get("size"), fields.get("count", fields.get("epochs", 1))
    if isinstance(count, list):
        fields["count"] = PerClient(tuple(count))
    try:
        made: Descriptor = cls(**fields)  # type: ignore[misc]
    except TypeError:
        raise Malformed(f"a sample is described as {str(value)[:80]}") from None
    if made.part not in ("lower", "upper"):
        raise Malformed(f"a sample is of the part {str(made.part)[:80]!r}")
    counts = count if isinstance(count, list) else [count]
    if not counts or not all(whole(n, 0, DRAWN) for n in counts) or not (size is None or whole(size, 1, SAMPLE)):
        raise Malformed("a sample has a size or a number of draws that is not a whole number, or too large a one")
    if not (getattr(made, "of", None) is None or whole(fields["of"], 0, 2**63)):
        raise Malformed("a sample takes the rows of a round that is not a whole number")
    if max(counts) * (size or 1) > DRAWN:
        raise Malformed(f"a sample draws {max(counts)} times {size or 1} rows, at most {DRAWN} are allowed")
    return made
