"""Runs: `train` takes objects, `run` takes a spec. There is one loop, and it is here."""

from ._train import OnDivergence, run, train
from ._watching import Observer, Progress, Result

__all__ = ["Observer", "OnDivergence", "Progress", "Result", "run", "train"]
