"""The command `bench`, which measures an outer iteration."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..errors import UnknownName
from ..files import storing
from .shared import out, say


def bench_command(
    cases: Annotated[
        list[str] | None, typer.Option("--case", metavar="NAME", help="A case; may be repeated.")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="Every case: about ten minutes.")] = False,
    names: Annotated[bool, typer.Option("--list", help="Show the names of the cases and end.")] = False,
    folder: Annotated[Path | None, typer.Option("--out", help="Where bench.json and bench.png go.")] = None,
    seconds: Annotated[
        float, typer.Option(min=1.0, max=3600.0, help="Time for a case's interleaved repeats.")
    ] = 25.0,
) -> None:
    """Measure one outer iteration beside its floor and beside PyTorch, in turn in one run."""
    # The benchmark imports Matplotlib, which the start of every other command should not wait for.
    from ..bench import CASES, STANDARD, bench, profile_table, ratio_table

    if names:
        say("\n".join(CASES))
        return
    chosen = list(CASES) if every else cases or [STANDARD]
    for name in chosen:
        if name not in CASES:
            raise UnknownName("case", name, CASES)
    with storing(folder or Path()):
        rows = bench(chosen, folder, seconds, lambda row: out.print(profile_table(row)))
    out.print(ratio_table(rows))
    if rows[0]["torch_loop_s"] is None:
        say("the PyTorch rivals did not run: they need the extra fedbilevel[bench], and a cohort of ten")
    if folder is not None:
        say(f"bench.json and bench.png: {folder}/")
