"""Tables, figures and pages from the records of runs."""

from ._board import Board, BoardEntry, BoardTable, Reached, board_page, write_board
from ._compare import Compared, write_comparison
from ._exchanges import Exchange, Iteration, draw_iterations
from ._figures import INK, MARK, draw_curve
from ._finding import draw_finding, ranked
from ._html import Section, write_report
from ._panels import ROWS, Line, draw_panels
from ._points import Points, draw_points
from ._tables import ledger_table, markdown_table, metrics_table, outcome_table, settings_table, study_table
from ._terminal import text_curve

__all__ = [
    "INK",
    "MARK",
    "ROWS",
    "Board",
    "BoardEntry",
    "BoardTable",
    "Compared",
    "Exchange",
    "Iteration",
    "Line",
    "Points",
    "Reached",
    "Section",
    "board_page",
    "draw_curve",
    "draw_finding",
    "draw_iterations",
    "draw_panels",
    "draw_points",
    "ledger_table",
    "markdown_table",
    "metrics_table",
    "outcome_table",
    "ranked",
    "settings_table",
    "study_table",
    "text_curve",
    "write_board",
    "write_comparison",
    "write_report",
]
