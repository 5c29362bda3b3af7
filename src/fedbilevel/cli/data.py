"""The commands `data list`, `data fetch` and `data show`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import data as data_room
from ..errors import SettingsError
from ..spec import load_spec
from .shared import Sets, SpecFile, out, say

data_app = typer.Typer(no_args_is_help=True, help="Data sets: list, fetch, and see how they are split.")


@data_app.command("list")
def data_list() -> None:
    """List the data sets, and which of them are in the cache."""
    out.print(data_room.dataset_table())


@data_app.command("fetch")
def data_fetch(
    name: str, force: Annotated[bool, typer.Option("--force", help="Fetch again, even if it is there.")] = False
) -> None:
    """Fetch a data set into the cache and verify it."""
    folder = data_room.fetch(name, force=force)
    where = folder if data_room.files_of(name) else "embedded, nothing to fetch"
    say(f"{name}: {where}")


@data_app.command("show")
def data_show(
    spec: SpecFile = None,
    sets: Sets = None,
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw it, as PNG or SVG.")] = None,
) -> None:
    """Show how a spec splits its data across clients: a table, and a picture of the labels."""
    chosen = load_spec(spec, sets or [])
    settings = chosen.data
    if settings.name == data_room.GENERATED:
        raise SettingsError("data.name = 'generated' has no labels to show; choose a problem with a data set")
    dataset, parts = settings.split(chosen.seed)
    out.print(data_room.label_table(dataset.train_targets, parts, dataset.classes))
    if picture is not None:
        labels, kind = dataset.train_targets, settings.partition
        try:
            data_room.draw_labels(picture, labels, parts, dataset.classes, dataset=dataset.name, kind=kind)
        except (OSError, ValueError) as error:
            raise SettingsError(f"--picture {picture} cannot be written: {error}") from None
        say(f"picture: {picture}")
