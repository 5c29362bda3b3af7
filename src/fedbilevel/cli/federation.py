"""The commands `site` and `federate`, which take part in a real federation."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import SettingsError
from ..federate import load_site
from ..federate.commands import federated, join, kit_run, need_flare, simulate_run
from ..files import check_place
from ..run import Observer
from .console import Bar
from .outcome import show
from .shared import Sets, err, resumable, run_folder, say

WEEK = 7 * 24 * 3600.0  # seconds


def site_command(
    site: Annotated[Path, typer.Argument(metavar="SITE.toml", help="The site's data and problem.")],
    kit: Annotated[Path | None, typer.Option("--kit", help="The site's kit, as provisioned.")] = None,
    check: Annotated[bool, typer.Option("--check/--no-check", help="Load everything once before joining.")] = True,
) -> None:
    """Take part in a federation with your own data; without --kit, only check that they load."""
    if check or kit is None:
        made = load_site(site)
        p, q = made.problem.size_x, made.problem.size_y
        say(
            f"{made.data.lower.rows} lower and {made.data.upper.rows} upper rows; {p} parameters of x and {q} of y"
        )
        if made.privacy is not None:
            limit = "no limit" if made.privacy.limit is None else f"epsilon at most {made.privacy.limit:g}"
            say(f"what the site sends is clipped and has noise {made.privacy.noise:g}; {limit}")
    if kit is not None:
        join(site, kit)


def federate_command(
    spec: Annotated[
        str | None, typer.Argument(metavar="[SPEC.toml]", help="A spec; default: the preset `sites`.")
    ] = None,
    sets: Sets = None,
    folder: Annotated[Path | None, typer.Option("--out", help="The run folder.")] = None,
    kit: Annotated[Path | None, typer.Option("--kit", help="The kit of an admin, as provisioned.")] = None,
    simulate: Annotated[
        int | None, typer.Option("--simulate-sites", min=1, help="Start a server and this many sites here.")
    ] = None,
    sites: Annotated[
        str | None, typer.Option(help="The registered sites, A,B,C; default: those that are up.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", help="Keep kits and logs of simulated sites here.")
    ] = None,
    restarts: Annotated[int, typer.Option(min=0, help="How often a failed job is followed by another.")] = 5,
    timeout: Annotated[float, typer.Option(min=1.0, max=WEEK, help="Seconds that a site has for a step.")] = 600.0,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run in the folder.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the run in the folder.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no tables.")] = False,
) -> None:
    """Run a spec on a real federation, whose sites keep their data and send only vectors."""
    need_flare()
    folder = run_folder(folder)
    if work is not None:
        check_place(work, "--work")
    if (kit is None) == (simulate is None):
        raise SettingsError("give either --kit DIR, of a federation that runs, or --simulate-sites N")
    names, build = sites.split(",") if sites else None, partial(federated, spec, sets or [])
    with resumable(), ExitStack() as stack:
        observers: list[Observer] = [] if quiet else [stack.enter_context(Bar())]
        tell = _silent if quiet else partial(err.print, markup=False, highlight=False)
        options: dict[str, Any] = dict(resume=resume, overwrite=overwrite, observers=observers)
        options |= dict(restarts=restarts, timeout=timeout, say=tell)
        if simulate is not None:
            chosen = build(simulate)
            result = simulate_run(chosen, folder, work=work, **options)
        else:
            assert kit is not None
            chosen, result = kit_run(build, folder, kit, names, **options)
    if not quiet:
        show(chosen, result)


def _silent(text: str) -> None:
    """Print nothing."""
