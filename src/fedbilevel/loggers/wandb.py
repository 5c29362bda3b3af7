"""Weights & Biases: a run that is stored on this machine, or sent to the service if the user says so."""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from ..settings import about, settings
from ._base import LoggedRun, need_extra, outcome, recall, remember, scalars


@settings
class WandB:
    """Writes settings, evaluations and results of a run to Weights & Biases, with rounds as its axis."""

    project: Annotated[str, about("the project to which the run belongs")] = "fedbilevel"
    entity: Annotated[str | None, about("the user or team that owns the project; default: the user's own")] = None
    mode: Annotated[
        Literal["offline", "online"] | None,
        about("offline: files that `wandb sync` can send; online: sent at once; default: WANDB_MODE, or offline"),
    ] = None

    def __post_init__(self) -> None:
        need_extra("wandb", "wandb")

    def start(self, run: LoggedRun) -> Sent:
        """Start a run, or another part of the one that was made when this run was started: it has the same id.

        Only what this class logs is written: no output of the terminal, no code, and nothing about the machine.
        """
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # it would report its own errors to its makers
        import wandb

        before = recall(run, "wandb")
        name = before.get("id") or secrets.token_hex(4)
        mode: Any = self.mode or os.environ.get("WANDB_MODE") or "offline"
        made = wandb.init(
            project=before.get("project") or self.project,
            entity=self.entity,
            mode=mode,
            id=name,
            resume="allow" if before and mode == "online" else None,  # offline, the same id is all that there is
            name=run.name,
            notes=run.title,
            config=dict(run.settings),
            dir=os.environ.get("WANDB_DIR") or run.folder,
            reinit="create_new",  # a run of the user's own in this process stays as it is
            settings=wandb.Settings(
                silent=True,
                console="off",
                disable_git=True,
                disable_code=True,
                save_code=False,
                x_disable_meta=True,
                x_disable_stats=True,
                x_disable_machine_info=True,
                x_save_requirements=False,
            ),
        )
        made.define_metric("*", step_metric="rounds")
        remember(run, "wandb", {"id": name, "project": made.project})
        return Sent(made, len(run.history))


class Sent:
    """An open run of Weights & Biases.

    Its steps number the lines of the history, so that the parts of a resumed run do not overlap.
    """

    def __init__(self, run: Any, step: int) -> None:
        self._run, self._step = run, step

    def log(self, record: Mapping[str, Any]) -> None:
        self._run.log(dict(scalars(record)), step=self._step)
        self._step += 1

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        if summary is not None:
            self._run.summary.update(outcome(summary))
        self._run.finish(exit_code=0 if summary is not None and "failure" not in summary else 1)
