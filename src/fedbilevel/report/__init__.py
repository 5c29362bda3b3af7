"""Tables, figures and pages from the records of runs."""

from .figures import draw_curve
from .html import Section, write_report
from .panels import Line, draw_panels
from .points import Points, draw_points
from .tables import ledger_table, markdown_table, outcome_table, study_table
from .terminal import text_curve

__all__ = [
    "Line",
    "Points",
    "Section",
    "draw_curve",
    "draw_panels",
    "draw_points",
    "ledger_table",
    "markdown_table",
    "outcome_table",
    "study_table",
    "text_curve",
    "write_report",
]
