"""The commands of a real federation: `site` and its `audit`, `server`, and `federate`."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from ..engines.flare import verify_audit
from ..errors import FedBilevelError, SettingsError
from ..federate import load_site
from ..federate.commands import federated, join, kit_run, need_flare, serve, simulate_run
from ..files import check_place
from ..run import Observer
from ..settings import to_mapping
from ..spec import Spec
from .console import Bar
from .outcome import show
from .shared import AcceptChange, Loggers, Sets, err, loggers_of, resumable, run_folder, say

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
        if made.policy is not None:
            limits = ", ".join(f"{name} = {value}" for name, value in to_mapping(made.policy).items())
            say(f"the site refuses what its policy does not allow: {limits or 'everything is allowed'}")
    if kit is not None:
        join(site, kit, say)


def audit_command(
    file: Annotated[Path, typer.Argument(metavar="AUDIT.jsonl", help="A site's audit file.")],
    noted: Annotated[
        str | None, typer.Option(help="A digest that was printed before; is its line still there?")
    ] = None,
) -> None:
    """Tell whether the chain of an audit file holds, and print the digest of its last line."""
    found = verify_audit(file)
    if found.broken is not None:
        raise FedBilevelError(f"{file}: the chain is broken: {found.broken}")
    if noted is not None and noted not in found.digests:
        raise FedBilevelError(
            f"{file}: no line has the digest {noted}; lines were removed, or all were written anew"
        )
    say(f"{found.lines} lines, the chain holds")
    if found.unlinked:
        say(f"the first {found.unlinked} are from before the chain")
    if found.torn:
        say("the last line is half a line, as after a crash")
    say(f"the digest of the last whole line: {found.last}")
    say("Note it elsewhere: lines that are removed at the end do not show in the file alone.")


def server_command(kit: Annotated[Path, typer.Option("--kit", help="The server's kit, as provisioned.")]) -> None:
    """Serve a federation. Sites and admins connect to this process."""
    serve(kit, say)


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
    log: Loggers = None,
    accept_change: AcceptChange = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="Show no progress and no tables.")] = False,
) -> None:
    """Run a spec on a real federation, whose sites keep their data and send only vectors."""
    need_flare()
    folder = run_folder(folder)
    if work is not None:
        check_place(work, "--work")
    if (kit is None) == (simulate is None):
        raise SettingsError("give either --kit DIR, of a federation that runs, or --simulate-sites N")
    names, loggers = sites.split(",") if sites else None, loggers_of(log)
    bar = Bar()

    def build(count: int) -> Spec:
        made = federated(spec, sets or [], count)
        bar.metric = made.watched
        return made

    with resumable(), ExitStack() as stack:
        observers: list[Observer] = [] if quiet else [stack.enter_context(bar)]
        tell = _silent if quiet else partial(err.print, markup=False, highlight=False)
        options: dict[str, Any] = dict(resume=resume, overwrite=overwrite, observers=observers)
        options |= dict(loggers=loggers, accept_change=accept_change)
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
