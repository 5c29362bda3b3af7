"""Runs: `train` takes objects, `run` takes a spec, and both use the same loop."""

from ._many import run_many, train_many
from ._rehearsal import Zeros
from ._saved import SavedRun, load_run
from ._train import OnDivergence, metrics_of, run, train
from ._watching import Observer, Progress, Result

__all__ = [
    "Observer",
    "OnDivergence",
    "Progress",
    "Result",
    "SavedRun",
    "Zeros",
    "load_run",
    "metrics_of",
    "run",
    "run_many",
    "train",
    "train_many",
]
