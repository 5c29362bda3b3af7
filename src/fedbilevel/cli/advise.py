"""The command `diagnose`, which measures a spec's problem and recommends step sizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from ..advisor import BIAS, diagnose
from ..errors import SettingsError
from ..files import results_folder, storing, write_whole
from ..spec import load_spec
from .shared import Sets, SpecFile, out, say


def diagnose_command(
    spec: SpecFile = None,
    sets: Sets = None,
    folder: Annotated[Path | None, typer.Option("--out", help="Where diagnosis.json and .png go.")] = None,
    solve: Annotated[
        bool, typer.Option("--solve/--no-solve", help="Solve for y first, or take it as it is.")
    ] = True,
    draws: Annotated[int, typer.Option(min=1, help="How often the method's estimate is drawn.")] = 8,
    bias: Annotated[
        float, typer.Option(min=1e-6, max=1.0, help="The bias for which a length is recommended.")
    ] = BIAS,
    beside: Annotated[
        bool, typer.Option("--beside", help="Also draw the estimates of FBO-AggITD with N = 10 and of FedSOBA.")
    ] = False,
) -> None:
    """Measure curvature and hypergradient at a spec's start, and recommend step sizes. Nothing is trained."""
    chosen = load_spec(spec, sets or [])
    if chosen.privacy.mode is not None:
        raise SettingsError(
            f"privacy.mode = {chosen.privacy.mode!r} is wrong here: a diagnosis measures clients without noise; "
            "remove it, and use public data"
        )
    if folder is not None:
        results_folder(folder, "--out")
    task = chosen.task()
    options = dict(
        solve=solve, draws=draws, bias=bias, beside=beside, federation=chosen.federation, seed=chosen.seed
    )
    found = diagnose(task.problem, chosen.clients(task), chosen.algorithm, **options)  # type: ignore[arg-type]
    out.print(found.table())
    changes = " ".join(f"--set algorithm.{each.setting}={each.recommended:g}" for each in found.advice)
    say(f"to use them: {changes}")
    say('to have them found in the run: the value "auto" for each of them')
    if folder is not None:
        with storing(folder):
            content = json.dumps(found.to_mapping(), indent=2).encode() + b"\n"
            write_whole(folder / "diagnosis.json", content, folder / ".diagnosis.json.tmp")
            found.draw(folder / "diagnosis.png")
        say(f"picture: {folder / 'diagnosis.png'}    figures: {folder / 'diagnosis.json'}")
