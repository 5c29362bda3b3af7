"""What the commands `site` and `federate` do. FLARE is imported only here below, when a run is submitted."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..run import Result
from ..spec import Spec, parse
from .local import LocalFederation, need_flare, simulated_sites

__all__ = ["federated", "join", "kit_run", "need_flare", "simulate_run"]

Say = Callable[[str], None]


def federated(spec: Spec, sites: int) -> Spec:
    """The spec of a run on this many sites, with a checkpoint after every outer iteration."""
    raw = spec.to_mapping()
    raw["data"]["clients"], raw["evaluate"]["checkpoint_every"] = sites, 1
    return parse(raw)


def join(site: Path, kit: Path) -> None:
    """Become the site's process: FLARE's client, told by the environment where the site's TOML is."""
    need_flare()
    start = kit / "startup" / "sub_start.sh"
    if not start.is_file() or not (kit / "startup" / "fed_client.json").is_file():
        raise SettingsError(f"--kit {kit} is not the kit of a site; give the folder that was provisioned for it")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    environment = {**os.environ, "FEDBILEVEL_SITE": str(site.resolve()), "PATH": path}
    os.execvpe("bash", ["bash", str(start), "--once"], environment)


def kit_run(
    spec: Spec, out: Path, kit: Path, names: list[str] | None, *, say: Say, restarts: int, **more: Any
) -> tuple[Spec, Result]:
    """Run on a federation that is up, by an admin's kit; also the spec as it was run."""
    from .submit import Kit, Submission

    admin = Kit(kit)
    sites = sorted(names) if names else admin.sites()
    if not sites:
        raise SettingsError("no site is up; start them with `fedbilevel site`, or name them with --sites")
    chosen = federated(spec, len(sites))
    return chosen, Submission(admin, sites, restarts=restarts, say=say).run(chosen, out, **more)


def simulate_run(spec: Spec, out: Path, *, work: Path | None, say: Say, restarts: int, **more: Any) -> Result:
    """Run on a federation of this machine, made for it and ended after it."""
    from .submit import Kit, Submission

    names = [f"site-{i + 1}" for i in range(spec.data.clients)]
    with ExitStack() as stack:
        place = work or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="fedbilevel-")))
        local = LocalFederation(place, simulated_sites(spec, place / "sites", names))
        say(f"starting a server and {len(names)} sites on this machine")
        stack.enter_context(local)
        submission = Submission(Kit(local.admin_kit), names, restarts=restarts, between=local.revive, say=say)
        return submission.run(spec, out, **more)
