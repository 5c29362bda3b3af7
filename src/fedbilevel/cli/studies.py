"""The commands `reproduce`, `tune` and `theory`, which run many specs and compare them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

from ..algorithms import AggITD
from ..errors import SettingsError
from ..files import check_place, storing
from ..problems import Quadratic
from ..report import study_table
from ..spec import load_spec
from ..studies import (
    QUICK,
    SEEDS,
    Application,
    Runs,
    Study,
    application_names,
    compare,
    load_application,
    load_study,
    reproduce,
    study_names,
    tune,
    verdict,
)
from ..studies.theory import run_theory, theory_table
from .shared import Sets, SpecFile, err, out, say

# A run has sequential parts, in which another one can use the cores; two at a time keep them busy.
JOBS = min(2, os.cpu_count() or 1)


def reproduce_command(
    names: Annotated[
        list[str],
        typer.Argument(
            help="Tables and figures, such as table2, or: all; applications, such as cleaning, or: applications."
        ),
    ],
    folder: Annotated[Path, typer.Option("--out", help="Where tables, figures and report.html go.")] = Path(
        "results"
    ),
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Seeds of every run; default: 1, and 5 for applications.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version; its results say so.")] = False,
    share: Annotated[float, typer.Option(min=0.0, max=1.0, help="Run this share of the rounds.")] = 1.0,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = JOBS,
    runs: Annotated[Path, typer.Option(help="Where runs are kept, by the digest of their spec.")] = Path(
        "runs/studies"
    ),
    finished: Annotated[
        bool, typer.Option("--finished", help="Applications: run nothing, and write the page of what is finished.")
    ] = False,
    kept: Annotated[
        Path | None,
        typer.Option("--keep", help="Take finished runs from this folder, and add to it: a small file for each."),
    ] = None,
) -> None:
    """Do the missing runs of tables and figures of the paper, or of applications with their controls."""
    chosen = [_named(name) for name in _names(names)]
    if quick or share < 1:
        chosen = [each.shortened(QUICK if quick else share) for each in chosen]
    studies = [each for each in chosen if isinstance(each, Study)]
    check_place(runs, "--runs")
    if kept is not None:
        check_place(kept, "--keep")
    with storing(folder):
        how: Any = {"out": folder, "runs": Runs(runs), "jobs": jobs, "console": err, "kept": kept}
        sections = reproduce(studies, seeds=seeds or 1, **how) if studies else []
        compared = [
            (e, compare(e, seeds=seeds or SEEDS, finished=finished, **how))
            for e in chosen
            if isinstance(e, Application)
        ]
    for section in sections:
        out.print(study_table(section.title, section.rows))
        say(section.remarks)
    if sections:
        say(f"report: {folder / 'report.html'}")
    for application, cells in compared:
        say(verdict(application, cells))
        say(f"page: {folder / application.name}.md")


def _names(names: list[str]) -> list[str]:
    """The names with `all` and `applications` written out, each once."""
    groups = {"all": study_names, "applications": application_names}
    return list(dict.fromkeys(each for name in names for each in (groups[name]() if name in groups else [name])))


def _named(name: str) -> Study | Application:
    return load_application(name) if name in application_names() else load_study(name)


def tune_command(
    grid: Annotated[
        list[str], typer.Option(metavar="KEY=V1;V2", help="One axis; KEY1,KEY2=A1,A2;B1,B2 for pairs.")
    ],
    spec: SpecFile = None,
    sets: Sets = None,
    folder: Annotated[Path, typer.Option("--out", help="Where runs, table and best.toml go.")] = Path("runs/tune"),
    seeds: Annotated[int, typer.Option(min=1)] = 1,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = JOBS,
    metric: Annotated[
        str | None, typer.Option(help="The metric to compare; default: test_accuracy, else upper_loss.")
    ] = None,
    mode: Annotated[
        str | None, typer.Option(help="max or min: which values are better; default: min for losses and errors.")
    ] = None,
    search: Annotated[
        str, typer.Option(help="grid; halving: short runs, then longer ones of the best third; optuna (an extra).")
    ] = "grid",
    sampler: Annotated[str, typer.Option(help="With optuna: tpe, random or cmaes.")] = "tpe",
    trials: Annotated[int, typer.Option(min=1, help="With optuna: the points that are tried.")] = 50,
) -> None:
    """Search settings and write the best as a spec. With optuna an axis can be a range: KEY=0.01..0.5."""
    for option, value, known in (
        ("--mode", mode, (None, "max", "min")),
        ("--search", search, ("grid", "halving", "optuna")),
        ("--sampler", sampler, ("tpe", "random", "cmaes")),
    ):
        if value not in known:
            raise SettingsError(f"{option} {value} is wrong: use {' or '.join(k for k in known if k)}")
    chosen: Any = {"metric": metric, "mode": mode, "search": search, "sampler": sampler, "trials": trials}
    with storing(folder):
        rows = tune(spec, sets or [], grid, seeds=seeds, out=folder, jobs=jobs, console=err, **chosen)
    out.print(study_table("Settings, best first", rows))
    say(f"best settings: {folder / 'best.toml'}")


def theory_command(
    spec: SpecFile = None,
    sets: Sets = None,
    radius: Annotated[
        float, typer.Option(min=0.0, max=1e9, help="The ball in which M and sigma_2 are taken.")
    ] = 10.0,
    iterations: Annotated[int, typer.Option("--K", min=1, help="Outer iterations K of Theorem 1.")] = 10_000,
    folder: Annotated[Path | None, typer.Option("--out", help="Also run the study of the bounds.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A short version of the study.")] = False,
) -> None:
    """Print every constant of the paper for a quadratic problem; with --out, also measure and compare the bounds.

    The problem, N and λ are those of the spec; problem.name=quadratic is set unless the spec has it.
    """
    chosen = load_spec(spec, [*(sets or []), "problem.name=quadratic"] if spec is None else sets or [])
    if not isinstance(chosen.problem, Quadratic) or not isinstance(chosen.algorithm, AggITD):
        raise SettingsError("theory needs problem.name = 'quadratic' and algorithm.name = 'fbo-aggitd'")
    constants = chosen.problem.make(chosen.data.clients, chosen.seed).constants(radius)
    out.print(theory_table(constants, chosen.algorithm.N, chosen.algorithm.lam, K=iterations))
    if folder is not None:
        with storing(folder):
            run_theory(folder, quick)
        say(f"figures, theory.md and theory.json: {folder}/")
