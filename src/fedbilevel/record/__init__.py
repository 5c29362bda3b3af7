"""The record of a run: its folder, its checkpoints, its summary and the environment that it was made in.

A run folder knows its run by a `Plan` only, so that anything can be recorded that has settings and a digest.
"""

from ._checkpoint import Checkpoint, flatten_state, restore_state
from ._environment import environment
from ._folder import BOOKS, CHECKPOINTS, FEDERATION, FILES, LOCK, REPORT, SOMETIMES, TEMPORARY, RunFolder
from ._glance import Glance, Status, glance, status_of
from ._metrics import COUNTED, Mode, better, direction, metric_names
from ._plan import Plan, digest_of, flat_settings
from ._summary import LEVELS, SILENT, WINDOW, in_window, number, summarise

__all__ = [
    "BOOKS",
    "CHECKPOINTS",
    "COUNTED",
    "FEDERATION",
    "FILES",
    "LEVELS",
    "LOCK",
    "REPORT",
    "SILENT",
    "SOMETIMES",
    "TEMPORARY",
    "WINDOW",
    "Checkpoint",
    "Glance",
    "Mode",
    "Plan",
    "RunFolder",
    "Status",
    "better",
    "digest_of",
    "direction",
    "environment",
    "flat_settings",
    "flatten_state",
    "glance",
    "in_window",
    "metric_names",
    "number",
    "restore_state",
    "status_of",
    "summarise",
]
