"""How FLARE is started for a site or for a server: what its kit lets jobs do, then FLARE's own script."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ..errors import SettingsError
from .kit import SERVER_CLASSES, SITE_CLASSES, close_kit

Say = Callable[[str], None]


class Startup(NamedTuple):
    """A command that starts FLARE, and the variables of its environment."""

    command: list[str]
    environment: dict[str, str]


def need_flare() -> None:
    """Raise if FLARE is not installed."""
    if importlib.util.find_spec("nvflare") is None:
        raise SettingsError("federate needs an extra: pip install 'fedbilevel[flare]'")


def of_site(site: Path, kit: Path, say: Say) -> Startup:
    """Close the kit of a site, and return what starts it. The environment tells it where the site's TOML is."""
    return _of(kit, "client", "site", SITE_CLASSES, say, {"FEDBILEVEL_SITE": str(site.resolve())})


def of_server(kit: Path, say: Say) -> Startup:
    """Close the kit of a server, and return what starts it."""
    return _of(kit, "server", "server", SERVER_CLASSES, say, {})


def _of(
    kit: Path, kind: str, owner: str, classes: Sequence[str], say: Say, environment: Mapping[str, str]
) -> Startup:
    need_flare()
    start = kit / "startup" / "sub_start.sh"
    if not _is_file(start) or not _is_file(kit / "startup" / f"fed_{kind}.json"):
        raise SettingsError(
            f"--kit {kit} is not the kit of a {owner}; give the folder that was provisioned for it"
        )
    for line in close_kit(kit, classes):
        say(line)
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return Startup(["bash", str(start), "--once"], {**os.environ, **environment, "PATH": path})


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a path that is too long
        return False
