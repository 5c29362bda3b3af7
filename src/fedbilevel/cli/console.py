"""The observer of a run that the command line offers: the progress bar."""

from __future__ import annotations

from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..run import Progress as Step
from .shared import err


class Bar:
    """A progress bar on the standard error, which is shown only if that is a terminal."""

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
            measure=_measure(step.record),
            speed=step.rounds / max(step.seconds, 1e-9),
        )


def _measure(record: dict[str, Any]) -> str:
    if record["test_accuracy"] is not None:
        return f"accuracy {record['test_accuracy']:.2%}"
    loss = record["upper_loss"]
    return "" if loss is None else f"upper loss {loss:.4g}"
