"""The record of a run: its folder, its checkpoints, its summary and the environment that it was made in.

A run folder knows its run by a `Plan` only, so that anything can be recorded that has settings and a digest.
"""

from ._checkpoint import Checkpoint, flatten_state, restore_state
from ._environment import environment
from ._folder import BOOKS, CHECKPOINTS, FEDERATION, FILES, LOCK, SOMETIMES, TEMPORARY, RunFolder
from ._metrics import COUNTED, Mode, better, direction, metric_names
from ._plan import Plan, digest_of, flat_settings
from ._summary import LEVELS, WINDOW, in_window, number, summarise

__all__ = [
    "BOOKS",
    "CHECKPOINTS",
    "COUNTED",
    "FEDERATION",
    "FILES",
    "LEVELS",
    "LOCK",
    "SOMETIMES",
    "TEMPORARY",
    "WINDOW",
    "Checkpoint",
    "Mode",
    "Plan",
    "RunFolder",
    "better",
    "digest_of",
    "direction",
    "environment",
    "flat_settings",
    "flatten_state",
    "in_window",
    "metric_names",
    "number",
    "restore_state",
    "summarise",
]
