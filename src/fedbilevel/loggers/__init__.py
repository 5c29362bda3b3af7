"""Loggers: what writes the evaluations of a run to TensorBoard, MLflow, Weights & Biases, or elsewhere.

To add one, write its file and add its line to `LOGGERS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..errors import SettingsError
from ..names import PYTHON, Names
from ..settings import choose
from ._base import Log, LoggedRun, Logger, scalars
from ._guard import Logs, messages
from .mlflow import MLflow
from .tensorboard import TensorBoard
from .wandb import WandB

LOGGERS: Names[type[Any]] = Names(
    "loggers",
    "logger",
    {"tensorboard": TensorBoard, "mlflow": MLflow, "wandb": WandB},
    needs=("start",),
)


def make_logger(given: Logger | Mapping[str, Any] | str) -> Logger:
    """The logger that is given by its name, by its address `module:Class`, by a table, or as an object.

    A table has the name and the settings of the logger, as in `{"name": "mlflow", "experiment": "digits"}`.
    """
    if isinstance(given, str) and ":" in given:
        given = {"name": PYTHON, "class": given}
    made = choose(LOGGERS, given, "logger")
    if not isinstance(made, Logger):
        raise SettingsError(f"logger = {type(made).__name__} is wrong: it lacks start, which all loggers have")
    return made


__all__ = [
    "LOGGERS",
    "Log",
    "LoggedRun",
    "Logger",
    "Logs",
    "MLflow",
    "TensorBoard",
    "WandB",
    "make_logger",
    "messages",
    "scalars",
]
