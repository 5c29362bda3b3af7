"""Studies: the paper's results and claims, run again and compared with the paper."""

from .reproduce import reproduce
from .runner import Runs, clock, run_all
from .study import QUICK, Study, load_study, study_names
from .tune import do_runs, tune

__all__ = [
    "QUICK",
    "Runs",
    "Study",
    "clock",
    "do_runs",
    "load_study",
    "reproduce",
    "run_all",
    "study_names",
    "tune",
]
