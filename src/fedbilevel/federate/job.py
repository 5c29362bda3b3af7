"""A job in FLARE's format: a folder of JSON files that carries a spec and a checkpoint, but no code.

The server and the sites run the library that is installed on them. FLARE still treats the job as one that brings
code, because its list of allowed classes has only its own. The `custom` folders mark it as such, but are empty.

Every site has a part of its own in the job. FLARE sends it to this site only, so it can bring a key.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

NAME = "fedbilevel"
PLACE = "custom"  # the folder of a job's part that has its order
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
    return Order(**json.loads(order_file(folder).read_text()))


def read_key(folder: Path) -> str:
    """The key that is in this folder of a site's part of a job."""
    return str(json.loads(order_file(folder).read_text())["key"])


def order_file(folder: Path) -> Path:
    """The file of an order in its folder."""
    return folder / "order.json"


def write_job(folder: Path, order: Order) -> Path:
    """Write a job for the sites that have a key in the order, and return the job's own folder."""
    controller = {
        "id": "controller",
        "path": "nvflare.collab.runtime.controller.CollabController",
        "args": {
            "server_obj_id": "_server",
            "collab_obj_ids": [],
            "props": {},
            "sync_task_timeout": 300,
            **THREADS,
        },
    }
    executor = {
        "path": "nvflare.collab.runtime.executor.CollabExecutor",
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
            **_common("_server", "ServerApp"),
            "workflows": [controller],
        },
        f"app_server/{PLACE}/order.json": asdict(order),
    }
    for site, app in apps.items():
        files[f"{app}/config/config_fed_client.json"] = {
            **_common("_client", "SiteApp"),
            "executors": [{"tasks": ["*"], "executor": executor}],
        }
        files[f"{app}/{PLACE}/order.json"] = {"key": order.keys[site]}
    for name, content in files.items():
        file = folder / NAME / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(content, indent=2))
    return folder / NAME


def _common(identity: str, cls: str) -> dict[str, Any]:
    return {
        "format_version": 2,
        "components": [{"id": identity, "path": f"fedbilevel.federate.app.{cls}", "args": {}}],
        "task_data_filters": [],
        "task_result_filters": [],
    }
