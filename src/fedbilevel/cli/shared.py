"""What the commands share: the two consoles, common arguments, and how a run ends when it is interrupted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import SettingsError
from ..files import check_place
from ..loggers import Logger, make_logger
from ..spec import parse_value

out = Console()
err = Console(stderr=True)

SpecFile = Annotated[str | None, typer.Argument(metavar="[SPEC.toml]", help="A spec; default: the demo.")]
Sets = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one setting.")]
Loggers = Annotated[
    list[str] | None,
    typer.Option(
        "--log", metavar="NAME", help="Also log to tensorboard, mlflow, wandb or module:Class; may be repeated."
    ),
]
AcceptChange = Annotated[
    bool, typer.Option("--accept-change", help="Resume although a module of the spec has changed.")
]


def say(text: str) -> None:
    """Print plain text on the standard output without wrapping it, since the terminal does that."""
    out.print(text, markup=False, highlight=False, soft_wrap=True)


def loggers_of(log: list[str] | None) -> list[Logger]:
    """The loggers that `--log` names."""
    return [make_logger(parse_value(each, "--log")) for each in log or []]


def run_folder(folder: Path | None) -> Path:
    """Return the folder that `--out` names, which a run cannot do without."""
    if folder is None:
        raise SettingsError("--out is missing; name a folder for the run, as in --out runs/first")
    check_place(folder, "--out")
    return folder


@contextmanager
def resumable() -> Iterator[None]:
    """Tell a user who interrupts a run how to continue it, and exit with code 130.

    Typer would exit without a message. Observers belong inside of this block, so that the progress bar is gone
    when the message is printed.
    """
    try:
        yield
    except KeyboardInterrupt:
        err.print("interrupted; the run goes on from its last checkpoint with --resume")
        raise typer.Exit(130) from None
