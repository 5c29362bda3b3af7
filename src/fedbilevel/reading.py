"""Reading text that others wrote: TOML and JSON, in files and in arguments.

Whatever is wrong with a text, the error is `Unreadable`. Its message continues the sentence that begins with the
name of the text, as in "spec my.toml is not TOML: ...".
"""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

DEPTH = 100  # levels of lists and tables; a spec has four
DOTS = 1000  # in a key; the time and memory of `tomllib` grow with the square of them
WIDTH = 64  # bits of a whole number, as TOML has it


class Unreadable(ValueError):
    """A text that cannot be read; the message says why, and the caller says which text it is."""


class Excessive(Unreadable):
    """A text of the right form, with something in it that is too large to be read, used or shown."""


def read_bytes(path: Path) -> bytes:
    """The content of a file."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise Unreadable(f"cannot be read: no file has such a name ({error})") from None


def read_toml(path: Path) -> dict[str, Any]:
    """The values of a TOML file."""
    return parse_toml(read_bytes(path))


def read_json(path: Path) -> Any:
    """The value of a JSON file."""
    return parse_json(read_bytes(path))


def parse_toml(content: str | bytes) -> dict[str, Any]:
    """The values of a TOML text."""
    text = _decoded(content, "TOML")
    plain = text.translate(str.maketrans("", "", " \t\"'"))
    if any(part.count(".") > DOTS for part in re.split(r"[\n,=\[\]{}]", plain)):
        raise Excessive(f"is not TOML that can be used: a key is nested too deeply, with more than {DOTS} dots")
    try:
        made = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise Unreadable(f"is not TOML: {error}") from None
    except ValueError as error:
        raise Excessive(f"is not TOML that can be used: {error}") from None
    except RecursionError:
        raise Excessive("is not TOML that can be used: it is nested too deeply") from None
    _check(made, "TOML")
    return made


def parse_json(content: str | bytes) -> Any:
    """The value of a JSON text."""
    try:
        made = json.loads(_decoded(content, "JSON"))
    except Unreadable:
        raise
    except ValueError as error:
        raise Unreadable(f"is not JSON: {error}") from None
    except RecursionError:
        raise Excessive("is not JSON that can be used: it is nested too deeply") from None
    _check(made, "JSON")
    return made


def _decoded(content: str | bytes, kind: str) -> str:
    try:
        return content if isinstance(content, str) else content.decode()
    except UnicodeDecodeError as error:
        raise Unreadable(f"is not {kind}: {error}") from None


def _check(value: Any, kind: str) -> None:
    """Raise for a value that no setting can have, and that an error message could not show."""
    level, depth = [value], 0
    while level:
        if depth > DEPTH:
            raise Excessive(f"is not {kind} that can be used: it is nested too deeply")
        if any(isinstance(v, int) and v.bit_length() > WIDTH for v in level):
            raise Excessive(f"is not {kind} that can be used: a whole number has more than {WIDTH} bits")
        inside = [v.values() if isinstance(v, dict) else v for v in level if isinstance(v, dict | list)]
        level, depth = [inner for values in inside for inner in values], depth + 1
