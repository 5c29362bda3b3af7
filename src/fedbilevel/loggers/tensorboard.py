"""TensorBoard: scalars in event files, in the folder `tensorboard` of the run."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..settings import settings
from ._base import LoggedRun, need_extra, scalars


@settings
class TensorBoard:
    """Writes every evaluation as scalars for TensorBoard, with rounds as the horizontal axis."""

    def __post_init__(self) -> None:
        need_extra("tensorboard", "tensorboardX")

    def start(self, run: LoggedRun) -> Events:
        """Open a new event file. TensorBoard hides what an earlier one has from after the last checkpoint."""
        from tensorboardX import SummaryWriter

        place = (run.folder or Path()) / "tensorboard"
        reached = run.history[-1]["rounds"] + 1 if run.history else None
        # The package names a file by the second and opens it anew, so a run that is resumed within a second would
        # erase what its first part wrote. TensorBoard reads files by their names, and nanoseconds keep the order.
        suffix = f".{time.time_ns()}"
        return Events(SummaryWriter(str(place), purge_step=reached, filename_suffix=suffix))


class Events:
    """An open event file."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, record: Mapping[str, Any]) -> None:
        for name, value in scalars(record):
            if name not in ("iteration", "rounds"):
                self._writer.add_scalar(name, value, record["rounds"])

    def finish(self, summary: Mapping[str, Any] | None) -> None:
        self._writer.close()
