"""Tables, figures and pages from the records of runs."""

from ._board import Board, BoardEntry, BoardTable, Reached, board_page, write_board
from ._compare import Compared, write_comparison
from ._controls import Scored, draw_controls
from ._exchanges import Exchange, Iteration, draw_iterations
from ._figures import INK, MARK, draw_curve
from ._finding import draw_finding, draw_worst, ranked
from ._html import Section, write_report
from ._measure import metric_text
from ._over_time import Course, draw_over_time
from ._panels import ROWS, Line, draw_panels
from ._points import Points, draw_points
from ._quality import Truthful, draw_quality
from ._run_page import live_page, missing_main, page_policy, run_main, run_page, write_run_page
from ._tables import (
    csv_table,
    ledger_table,
    markdown_table,
    metrics_table,
    outcome_table,
    settings_table,
    study_table,
)
from ._terminal import text_curve

__all__ = [
    "INK",
    "MARK",
    "ROWS",
    "Board",
    "BoardEntry",
    "BoardTable",
    "Compared",
    "Course",
    "Exchange",
    "Iteration",
    "Line",
    "Points",
    "Reached",
    "Scored",
    "Section",
    "Truthful",
    "board_page",
    "csv_table",
    "draw_controls",
    "draw_curve",
    "draw_finding",
    "draw_iterations",
    "draw_over_time",
    "draw_panels",
    "draw_points",
    "draw_quality",
    "draw_worst",
    "ledger_table",
    "live_page",
    "markdown_table",
    "metric_text",
    "metrics_table",
    "missing_main",
    "outcome_table",
    "page_policy",
    "ranked",
    "run_main",
    "run_page",
    "settings_table",
    "study_table",
    "text_curve",
    "write_board",
    "write_comparison",
    "write_report",
    "write_run_page",
]
