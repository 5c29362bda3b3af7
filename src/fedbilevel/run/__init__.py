"""Runs: `train` takes objects, `run` takes a spec, and both use the same loop."""

from ._train import OnDivergence, metrics_of, run, train
from ._watching import Observer, Progress, Result

__all__ = ["Observer", "OnDivergence", "Progress", "Result", "metrics_of", "run", "train"]
