"""The leaderboard: tune every method on every problem with the same number of runs, then run the chosen settings.

The rule, for every method alike: the parameters that the problem starts from; the same cohorts, which depend on
the outer iteration only; at most the same rows of a level a round; the same budget of rounds; the same number of
points of a grid, run with one seed and chosen by a metric that no test row enters; and then other seeds of the
chosen point. A run that diverges is counted, and its point is not chosen.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from ..files import results_folder
from ..record import environment
from ..report import Board, BoardEntry, BoardTable, markdown_table, write_board
from ..studies import Clock, Runs
from ._bench import Bench, Entered
from ._entries import Entry
from ._problems import BoardProblem
from ._results import AXES, curve

GRID = 24  # points that are tried of every method
SEEDS = 5  # runs of the chosen point; the grid is run with seed 0, and these with 1, 2, ...
QUICK_SEEDS = 3


def leaderboard(
    problems: Sequence[BoardProblem],
    methods: Sequence[Entry],
    *,
    seeds: int,
    out: Path,
    jobs: int,
    console: Console,
    points: int = GRID,
    remark: str = "",
) -> list[dict[str, Any]]:
    """Do the missing runs; write leaderboard.html, .md and .json and the chosen specs; return the rows.

    The runs are in `out/runs`, and those that are finished are not done again. The page is written anew after
    every problem, so that an interrupted leaderboard has one.
    """
    results_folder(out, "--out")
    progress = Clock(len(problems) * len(methods), console)
    boards: list[BoardTable] = []
    rows: list[dict[str, Any]] = []
    for problem in problems:
        bench = Bench(problem, Runs(out / "runs"), jobs, console)
        found = []
        for method in methods:
            start = time.monotonic()
            entry = bench.enter(method, seeds, points)
            found.append(entry)
            progress.tell(f"{problem.name}, {method.label}: {_in_words(entry, problem)}", time.monotonic() - start)
        boards.append(_table(problem, found, seeds))
        rows += [_row(problem, entry) for entry in found]
        _write(out, boards, rows, seeds, points, remark)
    return rows


def _table(problem: BoardProblem, found: Sequence[Entered], seeds: int) -> BoardTable:
    share = ", as a share of its start" if problem.relative else ""
    return BoardTable(
        name=problem.name,
        title=problem.title,
        metric=problem.show.replace("_", " ") + share,
        mode=problem.mode,
        log=problem.mode == "min",
        targets=problem.targets,
        entries=[_entry(problem, each) for each in found],
        note=f"{problem.rounds} rounds; settings chosen by {problem.select.replace('_', ' ')} at the end, seed 0; "
        f"curves and targets from {_counted(seeds, 'other seed')}",
    )


def _entry(problem: BoardProblem, each: Entered) -> BoardEntry:
    facts: dict[str, Any] = {}
    if each.values:
        facts = {"at the end": each.final(), "grid within 2x": each.within, "grid diverged": each.diverged}
        facts |= {"floor": each.floor, "closed form": each.closed} if problem.floor else {}
    marks = []
    if each.refused:
        marks.append(f"does not fit: {each.refused}")
    elif each.chosen is None:
        marks.append("diverged at every point")
    if failed := sum(failure is not None for failure in each.failures):
        marks.append(f"{failed} of {len(each.failures)} seeds diverged")
    if each.outside:
        marks.append(f"refuses {each.outside} of {len(each.tried)} points")
    if each.edge:
        marks.append(f"{', '.join(each.edge)} at the end of the range")
    return BoardEntry(
        label=each.method.label,
        control=each.method.control,
        spec=each.spec.to_toml() if each.spec else "",
        settings={} if each.chosen is None else each.chosen,
        note="; ".join(marks),
        facts=facts,
        curve=curve([run for run in each.runs if run]) if any(each.runs) else None,
        reached=each.reached(problem) if each.runs else [],
    )


def _row(problem: BoardProblem, each: Entered) -> dict[str, Any]:
    """A row of the table in leaderboard.md and .json."""
    entry = _entry(problem, each)
    row: dict[str, Any] = {"problem": problem.name, "method": entry.label}
    for target, reached in zip(problem.targets, each.reached(problem) if each.runs else (), strict=False):
        for axis in AXES:
            row[f"{axis.key} to {target:g}"] = (
                _plain(reached.at[axis.key]) if reached.at else "floor" if reached.forbidden else None
            )
    final = entry.facts.get("at the end")
    row |= {"at the end": None if final is None else f"{final:.3g}"}
    row |= {"floor": f"{each.floor:.2g}"} if each.floor is not None else {}
    row |= {"closed form": f"{each.closed:.2g}"} if each.closed is not None else {}
    row |= {"grid within 2x": f"{each.within:.0%}" if each.values else None, "diverged": each.diverged}
    row |= {"settings": ", ".join(f"{k} {v}" for k, v in entry.settings.items()), "note": entry.note}
    return row


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _plain(value: float) -> float:
    return float(f"{value:.4g}")


def _in_words(each: Entered, problem: BoardProblem) -> str:
    if each.refused:
        return f"does not fit ({each.refused})"
    final = each.final()
    if final is None:
        return "diverged"
    return f"{final:.3g} at the end, {each.diverged} of {len(each.values)} points diverged"


def _write(
    out: Path,
    boards: Sequence[BoardTable],
    rows: list[dict[str, Any]],
    seeds: int,
    points: int,
    remark: str,
) -> None:
    rule = (
        f"{points} points of a grid for every method, {_counted(seeds, 'seed')} of the chosen point; the same "
        f"start, cohorts by iteration, rows a round and budget. Revision {environment()['revision']}."
    )
    text = f"{remark} {rule}".strip()
    specs = out / "specs"
    specs.mkdir(exist_ok=True)
    for table in boards:
        for entry in table.entries:
            if entry.spec:
                (specs / f"{table.name}--{entry.label.replace(' ', '-')}.toml").write_text(entry.spec)
    board = Board("The leaderboard of federated bilevel methods", text, [*AXES], [*boards])
    write_board(out / "leaderboard.html", board)
    lines = [f"# Leaderboard\n\n{text}\n"]
    for each in boards:
        own = [{k: v for k, v in row.items() if k != "problem"} for row in rows if row["problem"] == each.name]
        left_out = tuple(f"{axis.key} to" for axis in AXES[1:])
        shown = [{k: v for k, v in row.items() if not k.startswith(left_out)} for row in own]
        lines.append(f"## {each.title} (`{each.name}`)\n\n{each.note}.\n\n{markdown_table(shown)}\n")
    (out / "leaderboard.md").write_text("\n".join(lines))
    (out / "leaderboard.json").write_text(json.dumps(rows, indent=1) + "\n")
