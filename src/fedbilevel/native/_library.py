"""Where the compiled files are."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent


def compiled(file: str, function: str) -> Any:
    """A function of a compiled file of this room; None if the file or the function is not there."""
    try:
        return getattr(ctypes.CDLL(str(FOLDER / file)), function)
    except (OSError, AttributeError):
        return None
