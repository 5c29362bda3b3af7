"""The commands `site`, `server` and `federate`. FLARE is imported only when a run is submitted."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..record import RunFolder
from ..run import Result
from ..spec import Spec, load_spec
from .loopback import LoopbackFederation, simulated_sites
from .startup import Say, Startup, need_flare, of_server, of_site

__all__ = ["federated", "join", "kit_run", "need_flare", "registered", "serve", "simulate_run"]

OF_A_RUN = ("resume", "overwrite", "observers", "loggers", "accept_change")  # options of `Submission.run`
STARTING = 300.0  # seconds for processes that this machine starts itself, however busy it is


def federated(source: str | None, sets: Sequence[str], sites: int) -> Spec:
    """The spec of a run on this many sites, with a checkpoint after every outer iteration."""
    spec = load_spec(source or "sites", [*sets, f"data.clients={sites}", "evaluate.checkpoint_every=1"])
    if spec.attack.kind is not None:
        raise SettingsError(
            f"attack.kind = {spec.attack.kind!r} is wrong on a real federation: sites compute for themselves; "
            "use a simulation"
        )
    if spec.evaluate.train:
        raise SettingsError(
            "evaluate.train = true is wrong on a real federation: the training rows are at the sites; "
            "remove it, or use a simulation"
        )
    return spec


def join(site: Path, kit: Path, say: Say) -> None:
    """Turn this process into FLARE's client for the site."""
    _become(of_site(site, kit, say))


def serve(kit: Path, say: Say) -> None:
    """Turn this process into FLARE's server."""
    _become(of_server(kit, say))


def _become(start: Startup) -> None:
    os.execvpe(start.command[0], start.command, start.environment)


def registered(out: Path, names: list[str] | None, resume: bool, up: Callable[[], list[str]]) -> list[str]:
    """The sites of a run: those named, those of the run that is resumed, or else those that are up."""
    if names:
        return sorted(names)
    if resume and (record := RunFolder(out).federation()) is not None:
        return list(record["sites"])
    sites = up()
    if not sites:
        raise SettingsError("no site is up; start them with `fedbilevel site`, or name them with --sites")
    return sites


def kit_run(
    build: Callable[[int], Spec], out: Path, kit: Path, names: list[str] | None, *, resume: bool, **more: Any
) -> tuple[Spec, Result]:
    """Run on a federation that is up, with an admin's kit; also return the spec for its number of sites."""
    from .submit import Kit, Submission

    admin = Kit(kit)
    sites = registered(out, names, resume, admin.sites)
    spec = build(len(sites))
    options = {key: more.pop(key) for key in OF_A_RUN if key in more}
    return spec, Submission(admin, sites, **more).run(spec, out, resume=resume, **options)


def simulate_run(spec: Spec, out: Path, *, work: Path | None, say: Say, **more: Any) -> Result:
    """Run on a federation on this machine, which is started for the run and ended after it."""
    from .submit import Kit, Submission

    names = [f"site-{i + 1}" for i in range(spec.data.clients)]
    options = {key: more.pop(key) for key in OF_A_RUN if key in more}
    with ExitStack() as stack:
        place = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedbilevel-")))
        loopback = LoopbackFederation(place, simulated_sites(spec, place / "sites", names))
        say(f"starting a server and {len(names)} sites on this machine")
        stack.enter_context(loopback)
        more = {"patience": STARTING, "between": loopback.revive, "say": say, **more}
        submission = Submission(Kit(loopback.admin_kit), names, **more)
        return submission.run(spec, out, **options)
