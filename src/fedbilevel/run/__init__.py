"""Runs: `train` takes objects, `run` takes a spec, and both use the same loop."""

from ._train import OnDivergence, run, train
from ._watching import Observer, Progress, Result

__all__ = ["Observer", "OnDivergence", "Progress", "Result", "run", "train"]
