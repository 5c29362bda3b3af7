"""The observer of a run that the command line offers: the progress bar."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..report import metric_text
from ..run import Progress as Step
from .shared import err


class Bar:
    """A progress bar on the standard error, which is shown only if that is a terminal.

    metric   what it shows beside the progress; by default the accuracy, or else the upper loss
    """

    def __init__(self, metric: str | None = None) -> None:
        self.metric = metric

    def __enter__(self) -> Bar:
        self._told = 0
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("iteration {task.fields[iteration]}"),
            TextColumn("{task.fields[rounds]} rounds"),
            BarColumn(),
            TextColumn("{task.fields[measure]}"),
            TextColumn("{task.fields[speed]:.1f} rounds/s"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=err,
            transient=True,
            disable=not err.is_terminal,  # A file or a pipe would only get an empty line.
        )
        self._task = self._progress.add_task(
            "run", total=1.0, iteration=0, rounds=0, measure="starting", speed=0.0
        )
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def __call__(self, step: Step) -> None:
        for note in step.notes[self._told :]:
            err.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        self._told = len(step.notes)
        self._progress.update(
            self._task,
            completed=step.share,
            iteration=step.iteration,
            rounds=step.rounds,
            measure=_measure(step.record, self.metric),
            speed=step.rounds / max(step.seconds, 1e-9),
        )


def _measure(record: dict[str, Any], metric: str | None) -> str:
    """The metric of this name, or the first of the usual ones that was measured."""
    for name in (metric, "test_accuracy", "upper_loss"):
        value = None if name is None else record.get(name)
        if name is not None and value is not None:
            return f"{name.removeprefix('test_').replace('_', ' ')} {metric_text(name, value)}"
    return ""
