"""MLflow: a run in a tracking store, which is a folder on this machine unless another one is named."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlparse

from ..record import flat_settings
from ..settings import about, settings
from ._base import LoggedRun, need_extra, outcome, recall, remember, scalars

STORE = "mlruns"  # the folder that MLflow's own documentation uses
LONGEST = 500  # characters of a parameter's value; every store of MLflow takes this many


@settings
class MLflow:
    """Writes settings, evaluations and results of a run to MLflow, with rounds as steps."""

    uri: Annotated[
        str | None,
        about("the tracking store: a folder, or the address of a server; default: MLFLOW_TRACKING_URI, or mlruns"),
    ] = None
    experiment: Annotated[str, about("the experiment to which the run belongs")] = "fedbilevel"

    def __post_init__(self) -> None:
        need_extra("mlflow", "mlflow")

    def start(self, run: LoggedRun) -> Tracked:
        """Make a run in the store, or go on with the one that was made when this run was started."""
        before = recall(run, "mlflow")
        store = before.get("uri") or _address(self.uri or os.environ.get("MLFLOW_TRACKING_URI") or STORE)
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")  # MLflow would report to its makers
        if urlparse(store).scheme == "file":
            # MLflow refuses a folder as its store unless it is told that one is wanted.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow import MlflowClient
        from mlflow.entities import Param

        client = MlflowClient(tracking_uri=store)
        if "id" in before:
            client.update_run(before["id"], status="RUNNING")
            return Tracked(client, before["id"])
        found = client.get_experiment_by_name(self.experiment)
        experiment = client.create_experiment(self.experiment) if found is None else found.experiment_id
        made = client.create_run(experiment, run_name=run.name, tags={"fedbilevel.title": run.title}).info.run_id
        settings = flat_settings(run.settings).items()
        client.log_batch(made, params=[Param(_allowed(name), str(value)[:LONGEST]) for name, value in settings])
        remember(run, "mlflow", {"id": made, "uri": store})
        return Tracked(client, made)


class Tracked:
    """An open run of MLflow."""

    def __init__(self, client: Any, run: str) -> None:
        self._client, self._run, self._rounds = client, run, 0

    def log(self, record: Mapping[str, Any]) -> None:
        self._rounds = record["rounds"]
        self._write(dict(scalars(record)))

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is None:
            self._client.set_terminated(self._run, status="KILLED")
            return
        self._write(outcome(summary))
        self._client.set_terminated(self._run, status="FAILED" if "failure" in summary else "FINISHED")

    def _write(self, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        metrics = [Metric(_allowed(name), value, now, self._rounds) for name, value in values.items()]
        self._client.log_batch(self._run, metrics=metrics)


def _address(store: str) -> str:
    """The address of a store. A folder is named by its full path, so that a resumed run finds it from anywhere."""
    return store if urlparse(store).scheme or store == "databricks" else Path(store).resolve().as_uri()


def _allowed(name: str) -> str:
    """The name with an underscore for every character that MLflow does not allow."""
    return re.sub(r"[^\w\-. :/]", "_", name)
