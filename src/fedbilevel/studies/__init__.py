"""Studies: the paper's results, run again beside the paper's; applications beside their controls."""

from .application import Application, application_names, load_application
from .comparison import SEEDS, compare
from .comparison_page import verdict
from .reproduce import reproduce
from .runner import Clock, Runs, Workers, clock, run_all
from .study import QUICK, Study, load_study, study_names
from .tune import alone, do_runs, do_runs_or_alone, tune

__all__ = [
    "QUICK",
    "SEEDS",
    "Application",
    "Clock",
    "Runs",
    "Study",
    "Workers",
    "alone",
    "application_names",
    "clock",
    "compare",
    "do_runs",
    "do_runs_or_alone",
    "load_application",
    "load_study",
    "reproduce",
    "run_all",
    "study_names",
    "tune",
    "verdict",
]
