"""The command `new`, which makes a project of a user's own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..templates import make_project
from .shared import say


def new_command(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The name of the project.")],
    folder: Annotated[Path | None, typer.Option("--out", help="The folder to make; default: NAME.")] = None,
) -> None:
    """Make a project folder with a problem of your own, its spec, a site's file and a test."""
    place = Path(name) if folder is None else folder
    written = make_project(name, place)
    say(f"{place}/ has {', '.join(file.name for file in written)}")
    say(f"cd {place} && make test run")
