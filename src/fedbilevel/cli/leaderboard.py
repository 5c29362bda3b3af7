"""The command `leaderboard`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..files import check_place, storing
from ..leaderboard import GRID, QUICK_SEEDS, SEEDS, entries, leaderboard, load_problems
from ..report import study_table
from .shared import err, out, say
from .studies import JOBS


def leaderboard_command(
    folder: Annotated[
        Path, typer.Option("--out", help="Where leaderboard.html, tables, specs and runs go.")
    ] = Path("results/leaderboard"),
    problems: Annotated[
        list[str] | None,
        typer.Option(help="A problem, the first part of its name, or a TOML of your own; may be repeated."),
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="A method, such as simfbo or 'fedavg joint'; may be repeated.")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Two quadratics and three seeds; its results say so.")
    ] = False,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds of the chosen settings; default: 5.")] = None,
    points: Annotated[int, typer.Option(min=1, help="Points of the grid of every method.")] = GRID,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, where they are not in one program.")] = JOBS,
    names: Annotated[bool, typer.Option("--list", help="Only list the problems and the methods.")] = False,
) -> None:
    """Run every method on every problem under one rule, and write a page that compares them.

    The same command goes on where it was stopped: finished runs are not done again.
    """
    chosen, tried = load_problems(problems or ()), entries(methods or ())
    if quick and not problems:
        chosen = [each for each in chosen if each.quick]
    if names:
        say("problems: " + ", ".join(each.name for each in chosen))
        say("methods: " + ", ".join(each.label for each in tried))
        return
    check_place(folder, "--out")
    count = seeds or (QUICK_SEEDS if quick else SEEDS)
    parts = ["QUICK: fewer seeds and problems than the whole leaderboard."] if quick else []
    if problems or methods:
        parts.append("A part of the leaderboard.")
    with storing(folder):
        rows = leaderboard(
            chosen,
            tried,
            seeds=count,
            out=folder,
            jobs=jobs,
            console=err,
            points=points,
            remark=" ".join(parts),
        )
    shown = ("problem", "method", "at the end", "diverged", "note")
    kept = [{k: v for k, v in row.items() if k in shown or k.startswith("rounds to")} for row in rows]
    for each in chosen:
        own = [{k: v for k, v in row.items() if k != "problem"} for row in kept if row["problem"] == each.name]
        out.print(study_table(each.title, own))
    say(f"page: {folder / 'leaderboard.html'}")
