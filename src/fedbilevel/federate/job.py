"""A job in FLARE's format: a folder of JSON files that carries a spec and a checkpoint, but no code.

The server and the sites run the library that is installed on them. FLARE still treats the job as one that brings
code, because its list of allowed classes has only its own. The `custom` folders mark it as such, but are empty.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NAME = "fedbilevel"
ORDER = "order.json"
THREADS = {"max_inbound_call_threads": 16, "max_outbound_call_threads": 64}


def write_job(folder: Path, sites: Sequence[str], order: Mapping[str, Any]) -> Path:
    """Write a job for these sites, with an order for the server, and return the job's own folder."""
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
    files: dict[str, Any] = {
        "meta.json": {
            "name": NAME,
            "resource_spec": {},
            "min_clients": len(sites),
            "deploy_map": {"app_server": ["server"], "app_site": list(sites)},
        },
        "app_server/config/config_fed_server.json": {
            **_common("_server", "ServerApp"),
            "workflows": [controller],
        },
        f"app_server/custom/{ORDER}": dict(order),
        "app_site/config/config_fed_client.json": {
            **_common("_client", "SiteApp"),
            "executors": [{"tasks": ["*"], "executor": executor}],
        },
        f"app_site/custom/{ORDER}": {},
    }
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
