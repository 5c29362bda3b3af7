"""A job in FLARE's format: a folder of JSON files that carries a spec and a checkpoint, but no code.

The server and the sites run the library that is installed on them. FLARE takes a job with a folder `custom` for
one that brings code, so our orders are beside FLARE's own configuration. The classes that the job names must be on
the list of each participant; see `kit.py`.

Every site has a part of its own in the job. FLARE sends it to this site only, so it can bring a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..errors import SettingsError
from ..record import BOOKS
from .kit import SERVER_CLASSES, SITE_CLASSES

NAME = "fedbilevel"
PLACE = "config"  # the folder of a job's part that has its order
CHECKPOINT = "checkpoint.safetensors"
CARRIED = ("spec.toml", "history.jsonl", CHECKPOINT, BOOKS)  # the files of a run folder from which a run goes on
THREADS = {"max_inbound_call_threads": 16, "max_outbound_call_threads": 64}


@dataclass(frozen=True)
class Order:
    """What the submitter of a run tells the server.

    spec     the spec, as TOML
    run      the name of the run
    sites    the names of all registered sites, whether they take part in this job or not
    timeout  seconds that a site has for a step
    files    the files of the run folder from which the run goes on, in base64
    keys     the keys of the sites in this job, by which a site knows that a request is from the server
    key      the key by which the server knows that an app command is from the submitter
    """

    spec: str
    run: str
    sites: Sequence[str]
    timeout: float
    files: Mapping[str, str]
    keys: Mapping[str, str]
    key: str


def read_order(folder: Path) -> Order:
    """The order that is in this folder of the server's part of a job."""
    order = Order(**json.loads(order_file(folder).read_text()))
    if not order.run.isalnum() or not order.run.isascii() or len(order.run) > 64:  # it becomes the name of a file
        raise SettingsError(f"the order names its run {order.run[:80]!r}; a name has up to 64 letters and digits")
    for name in order.files:
        if name not in CARRIED:
            raise SettingsError(f"the order has a file {name!r}; a run goes on from {', '.join(CARRIED)} only")
    return order


def read_key(folder: Path) -> str:
    """The key that is in this folder of a site's part of a job."""
    return str(json.loads(order_file(folder).read_text())["key"])


def order_file(folder: Path) -> Path:
    """The file of an order in its folder."""
    return folder / "order.json"


def write_job(folder: Path, order: Order) -> Path:
    """Write a job for the sites that have a key in the order, and return the job's own folder."""
    (controlling, serving), (executing, answering) = SERVER_CLASSES, SITE_CLASSES
    controller = {
        "id": "controller",
        "path": controlling,
        "args": {
            "server_obj_id": "_server",
            "collab_obj_ids": [],
            "props": {},
            "sync_task_timeout": 300,
            **THREADS,
        },
    }
    executor = {
        "path": executing,
        "args": {"client_obj_id": "_client", "collab_obj_ids": [], "props": {}, **THREADS},
    }
    apps = {site: f"app_site_{number}" for number, site in enumerate(order.keys, 1)}
    files: dict[str, Any] = {
        "meta.json": {
            "name": NAME,
            "resource_spec": {},
            "min_clients": len(apps),
            "deploy_map": {"app_server": ["server"], **{app: [site] for site, app in apps.items()}},
        },
        "app_server/config/config_fed_server.json": {
            **_common("_server", serving),
            "workflows": [controller],
        },
        f"app_server/{PLACE}/order.json": asdict(order),
    }
    for site, app in apps.items():
        files[f"{app}/config/config_fed_client.json"] = {
            **_common("_client", answering),
            "executors": [{"tasks": ["*"], "executor": executor}],
        }
        files[f"{app}/{PLACE}/order.json"] = {"key": order.keys[site]}
    for name, content in files.items():
        file = folder / NAME / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2))
    return folder / NAME


def _common(identity: str, path: str) -> dict[str, Any]:
    return {
        "format_version": 2,
        "components": [{"id": identity, "path": path, "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }
