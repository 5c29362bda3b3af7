"""The observers of a run that the command line offers: the progress bar and TensorBoard."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from numbers import Real
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..errors import SettingsError
from ..run import Progress as Step
from .shared import err


class Bar:
    """A progress bar on the standard error, which is shown only if that is a terminal."""

    def __enter__(self) -> Bar:
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
        self._progress.update(
            self._task,
            completed=step.share,
            iteration=step.iteration,
            rounds=step.rounds,
            measure=_measure(step.record),
            speed=step.rounds / max(step.seconds, 1e-9),
        )


class TensorBoard:
    """An observer that writes every evaluation as scalars for TensorBoard, with rounds as the horizontal axis."""

    def __init__(self, folder: Path) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError:
            raise SettingsError(
                "--log tensorboard needs an extra: pip install 'fedbilevel[tensorboard]'"
            ) from None
        self._make, self._folder, self._last = SummaryWriter, folder / "tensorboard", -1

    def __enter__(self) -> TensorBoard:
        self._writer: Any = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._writer.close()

    def __call__(self, step: Step) -> None:
        if step.record["iteration"] == self._last:
            return
        if self._writer is None:
            self._writer = self._make(str(self._folder))
        self._last = step.record["iteration"]
        for name, value in scalars(step.record):
            if name not in ("iteration", "rounds"):
                self._writer.add_scalar(name, value, step.record["rounds"])


def scalars(record: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Yield the name and value of every number in a record of the history.

    A number in a nested mapping has the joined keys as its name, such as `rejected/reason/no answer`. Values
    that are not numbers are excluded.
    """
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from scalars(value, f"{prefix}{key}/")
        elif isinstance(value, Real) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def logger(kind: str, folder: Path) -> TensorBoard:
    """Return the logger that `--log` names."""
    if kind != "tensorboard":
        raise SettingsError(f"--log {kind} is unknown; use tensorboard")
    return TensorBoard(folder)


def _measure(record: dict[str, Any]) -> str:
    if record["test_accuracy"] is not None:
        return f"accuracy {record['test_accuracy']:.2%}"
    loss = record["upper_loss"]
    return "" if loss is None else f"upper loss {loss:.4g}"
