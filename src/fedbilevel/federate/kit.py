"""What a kit lets jobs do: which classes they may name, and that they bring no code.

FLARE builds the objects of a job from the classes that the job names. A kit's file `local/resources.json` lists
the classes that are allowed. The list counts only for jobs without code of their own, so the file
`local/authorization.json` must also forbid those that bring code (FLARE calls them `byoc`). A provisioned kit has
a `.default` of both files, which counts where the file itself is missing. It allows about a hundred classes, and
code.

A site's kit also sends the error log of every job to the server, by a class that FLARE adds to the job. The file
that is written here turns this off, because an error can quote what the site wants to keep.

A missing file is written. A file that exists is its owner's: it is read, and never changed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..files import write_whole

SITE_CLASSES = ("nvflare.collab.runtime.executor.CollabExecutor", "fedbilevel.federate.app.SiteApp")
SERVER_CLASSES = ("nvflare.collab.runtime.controller.CollabController", "fedbilevel.federate.app.ServerApp")

_LIST, _MODE = "class_allow_list", "class_list_enforcement_mode"  # the keys in FLARE's file
_LOGS = "allow_log_streaming"
_STREAMER = "nvflare.app_common.logging.job_log_streamer.JobLogStreamer"  # added to jobs where logs are streamed
_CODE = ("byoc", "server-predeployed-flwr")  # the rights to bring code, or to start code that is not a job's


def close_kit(kit: Path, classes: Sequence[str]) -> list[str]:
    """Let jobs name these classes only, and bring no code. Return what the owner of the kit should know."""
    return [*_close_classes(kit / "local", classes), *_close_code(kit / "local")]


def _close_classes(local: Path, classes: Sequence[str]) -> list[str]:
    own = local / "resources.json"
    if not own.exists():
        content = _read(local / "resources.json.default") | {_LIST: list(classes)}
        _write(own, content | {_MODE: "enforce", _LOGS: False})
        return [f"wrote {own}: jobs may name {', '.join(classes)} and no other class"]
    found = _read(own)
    allowed = found.get(_LIST, [])
    if not isinstance(allowed, list) or not all(isinstance(entry, str) for entry in allowed):
        raise SettingsError(f"{own} is wrong: {_LIST} is not a list of names")
    needed = [*classes, _STREAMER] if _streams(found) else classes
    lacking = [name for name in needed if not any(_covers(entry, name) for entry in allowed)]
    if lacking:
        raise SettingsError(
            f"{own} does not allow {', '.join(lacking)}; add them to its {_LIST}, or move the file away, "
            "and one is written that allows nothing else"
            + (f"; {_STREAMER} is needed as long as {_LOGS} is not false" if _STREAMER in lacking else "")
        )
    said = []
    more = [entry for entry in allowed if entry not in needed]
    if more:
        said.append(f"{own} is yours and stays; it also lets jobs name {', '.join(more)}")
    if found.get(_MODE, "enforce") != "enforce":
        said.append(f"{own} is yours and stays; its {_MODE} is {found[_MODE]!r}, so jobs may name any class")
    return said


def _close_code(local: Path) -> list[str]:
    own = local / "authorization.json"
    if not own.exists():
        content = _read(local / "authorization.json.default")
        roles = {role: _without_code(rights) for role, rights in _roles(own, content).items()}
        _write(own, content | {"permissions": roles})
        return [f"wrote {own}: no job may bring code"]
    open_to = [
        role
        for role, rights in _roles(own, _read(own)).items()
        if not isinstance(rights, Mapping)
        or any(rights.get(right, "none") not in ("none", "no") for right in _CODE)
    ]
    return [f"{own} is yours and stays; it lets {', '.join(open_to)} bring code"] if open_to else []


def _without_code(rights: Any) -> dict[str, Any]:
    """The rights of a role without those to bring code.

    FLARE has no way to say "all but these", so a condition for all rights is written for each of its commands.
    """
    if not isinstance(rights, Mapping):
        from nvflare.apis.fl_constant import AdminCommandNames

        commands = [name for key, name in vars(AdminCommandNames).items() if not key.startswith("_")]
        rights = dict.fromkeys(commands, rights)
    return {**rights, **dict.fromkeys(_CODE, "none")}


def _streams(resources: Mapping[str, Any]) -> bool:
    """Whether FLARE adds to every job the class that sends its log to the server."""
    parts = resources.get("components", [])
    adds = any(str(part.get("path", "")).endswith(".SiteLogStreamer") for part in parts if isinstance(part, dict))
    return adds and resources.get(_LOGS, True) is not False


def _covers(entry: str, name: str) -> bool:
    """Whether an entry of FLARE's list allows a class."""
    return entry in ("*", name) or name.startswith(entry if entry.endswith(".") else f"{entry}.")


def _roles(file: Path, content: Mapping[str, Any]) -> Mapping[str, Any]:
    roles = content.get("permissions")
    if not isinstance(roles, Mapping):
        raise SettingsError(f"{file} is wrong: it has no permissions")
    return roles


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise SettingsError(f"{file} is wrong: {error}; give the folder that was provisioned") from None
    if not isinstance(found, dict):
        raise SettingsError(f"{file} is wrong: it is not a table; give the folder that was provisioned")
    return found


def _write(file: Path, content: Mapping[str, Any]) -> None:
    try:
        write_whole(file, json.dumps(content, indent=2).encode(), file.with_name(f"{file.name}.new"))
    except OSError as error:
        raise SettingsError(f"{file} cannot be written: {error.strerror}; make it writable") from None
