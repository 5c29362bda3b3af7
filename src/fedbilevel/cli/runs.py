"""The commands `run` and `check`, which use a spec on this machine."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import processes
from ..check import check as check_problem
from ..errors import DataUnavailable, SettingsError
from ..layers import load_chaos
from ..run import Observer, run
from ..spec import Spec, describe, load_spec
from .console import Bar
from .outcome import show
from .shared import AcceptChange, Loggers, Sets, SpecFile, err, loggers_of, out, resumable, run_folder


def run_command(
    spec: SpecFile = None,
    sets: Sets = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    log: Loggers = None,
    accept_change: AcceptChange = False,
    print_spec: Annotated[bool, typer.Option("--print-spec", help="Show every setting and end.")] = False,
    or_digits: Annotated[
        bool, typer.Option("--or-digits", help="Use the embedded digits if the data set cannot be fetched.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no tables.")] = False,
    chaos: Annotated[
        Path | None, typer.Option("--chaos", metavar="FILE", help="Inject the faults that this TOML sets.")
    ] = None,
    on_divergence: Annotated[
        str, typer.Option(help="stop, or restart: go back and halve the step size that is likely to blame.")
    ] = "stop",
    distributed: Annotated[
        bool, typer.Option("--distributed", help="Join a run of several processes; see docs/scale.md.")
    ] = False,
) -> None:
    """Run a spec into a folder: history, summary, checkpoint and curve."""
    chosen = load_spec(spec, sets or [])
    if print_spec:
        sys.stdout.write(describe(chosen))
        return
    folder = run_folder(folder)
    if on_divergence not in ("stop", "restart"):
        raise SettingsError(f"--on-divergence {on_divergence} is wrong: use stop or restart")
    faults = None if chaos is None else load_chaos(chaos)
    loggers = loggers_of(log)
    if distributed:
        processes.join()
        quiet = quiet or not processes.is_first()
    if or_digits:
        chosen = _or_digits(chosen, spec, sets or [])
    with resumable(), ExitStack() as stack:
        observers: list[Observer] = []
        if not quiet:
            observers.append(stack.enter_context(Bar(chosen.watched)))
        options: dict[str, Any] = dict(resume=resume, overwrite=overwrite, on_divergence=on_divergence)
        options |= dict(loggers=loggers, accept_change=accept_change)
        result = run(chosen, folder, observers=observers, chaos=faults, **options)
    if not quiet:
        show(chosen, result)


def check_command(spec: SpecFile = None, sets: Sets = None) -> None:
    """Compare every derivative of a spec's problem with finite differences."""
    task = load_spec(spec, sets or []).task()
    report = check_problem(task.problem, task.clients)
    out.print(report.table())
    raise typer.Exit(0 if report.ok else 1)


def _or_digits(chosen: Spec, spec: str | None, sets: list[str]) -> Spec:
    """Return the spec, or the same spec on the embedded digits if its data set cannot be fetched."""
    try:
        chosen.data.fetch()
    except DataUnavailable as error:
        err.print(f"{error}\nGoing on with the embedded digits.", markup=False, style="yellow")
        return load_spec(spec, [*sets, "data.name=digits"])
    return chosen
